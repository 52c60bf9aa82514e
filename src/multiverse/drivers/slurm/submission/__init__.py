"""What passes between the controller and multiverse.lua, as files, while jobs are submitted: limits, offers, hints."""
