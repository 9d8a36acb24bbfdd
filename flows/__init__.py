"""Define the flows that Prefect executes.

Prefect's server stores log lines and reasons of failures, so they are redacted first.
"""

import logging

from lachesis.base.secrets import redact_log_records

# Without a level, log lines of this package would not reach the run's page.
logging.getLogger("lachesis").setLevel(logging.INFO)
redact_log_records()
# Prefect logs "Finished in state Completed()" for each task, which its page shows anyway.
logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)
