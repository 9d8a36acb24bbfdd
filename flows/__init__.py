"""Define the flows that Prefect executes.

Prefect's server stores log lines and reasons of failures, so they are redacted first.
"""

import logging

from lachesis.base.secrets import redact_log_records

# Without a level, log lines of this package would not reach the run's page.
logging.getLogger("lachesis").setLevel(logging.INFO)
redact_log_records()
