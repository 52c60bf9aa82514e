# Where programs find their licence server.
export LM_LICENSE_FILE=27000@licence.example.org
