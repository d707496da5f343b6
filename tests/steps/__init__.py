"""What tests of several rooms do alike."""
