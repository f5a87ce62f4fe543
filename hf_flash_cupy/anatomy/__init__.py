"""What standard attention, FlashAttention-1 and FlashAttention-2 do for one shape, side by side."""
