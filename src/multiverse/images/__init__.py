"""Images: bootable disks with everything that a job needs. `build` makes them, `catalog` finds them."""
