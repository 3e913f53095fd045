/* What a connection's TCP has carried, both ways, as the kernel counts it: the sum stands still while a
 * program's bytes go another way. */
#pragma once

#include <stdint.h>

uint64_t tcp_bytes(int fd);
