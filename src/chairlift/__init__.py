"""Chairlift: an OpenAI-compatible inference server with continuous batching on MLX."""
