"""Images that come with the package, and their licence."""
