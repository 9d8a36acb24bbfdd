"""Let today's Tinker clients train on SkyRL's engine, which speaks an older protocol."""
