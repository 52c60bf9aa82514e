#!/bin/sh
# Runs in the image: jobs read no documentation.
set -eu
rm -rf /usr/share/doc/*
