"""Problems, their cases and numbers of rows, and the proof documents about them."""
