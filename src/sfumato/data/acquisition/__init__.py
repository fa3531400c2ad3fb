"""Where known sets come from: official archives, packages, files that are at hand."""
