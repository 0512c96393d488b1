"""What the commands of ``forebay.cli`` do, one file each. Only ``forebay.cli`` imports them."""
