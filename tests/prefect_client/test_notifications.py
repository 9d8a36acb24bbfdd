"""Which addresses the server's automations can call, and what an evaluation may hold."""

import pytest

from lachesis.base.errors import ConfigError
from lachesis.prefect_client.notifications import set_notifications


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://a/",
        "http://[::1",
        "http://a b/",
        "http://localhost:99999/x",
        "http://a/\n",
        "http://a/{{ flow_run }}",
    ],
)
def test_an_address_that_cannot_work_is_refused(url):
    with pytest.raises(ConfigError, match="is not a web address; allowed"):
        set_notifications(url)
