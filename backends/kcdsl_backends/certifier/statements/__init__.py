"""Problems, their cases, blocks at any length, and proof documents."""
