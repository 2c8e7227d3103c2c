"""An OpenAI-compatible HTTP front for a Triton server: same models, same queue, same texts."""
