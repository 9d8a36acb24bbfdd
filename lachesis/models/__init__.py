"""Find language models and read what their files say."""
