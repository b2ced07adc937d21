"""Writers of files, one for each tool."""
