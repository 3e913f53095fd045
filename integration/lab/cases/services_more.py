"""The services that take long between emulated hosts. Not in scripts/test: `integration/lab/run_lab services_more`."""

import services

group = services.more
