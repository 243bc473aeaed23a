"""What a job tells about itself when it fails, hangs or ends."""
