"""Turn what a user asks for into a run: resolve it once, check it, create it, resume it."""
