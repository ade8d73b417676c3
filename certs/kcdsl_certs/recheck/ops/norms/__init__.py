"""layer_norm and rms_norm."""
