"""Every private torch symbol that this package uses."""
