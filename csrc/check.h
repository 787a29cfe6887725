// One check macro for preconditions. It survives -DNDEBUG, and Python sees a ValueError with exactly the message given.
#pragma once

#include <stdexcept>
#include <string>

// `message` is only evaluated when the check fails, so it may build strings.
#define ZINF_CHECK(condition, message)                              \
    do {                                                            \
        if (!(condition)) [[unlikely]]                              \
            throw std::invalid_argument(std::string(message));      \
    } while (false)
