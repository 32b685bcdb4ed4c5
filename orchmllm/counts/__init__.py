"""What modules compute, counted on tensors without memory."""
