"""Pages and plots of what runs may show."""
