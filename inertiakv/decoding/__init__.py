"""Forward passes over the cache (prompt chunk, first step, decode step), and the loop that runs them."""
