"""Keep every rollout in Parquet files, and find it again."""
