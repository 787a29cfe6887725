#include "error.h"

#include <system_error>

namespace zinf::aio {

std::string errno_text(int code) { return std::generic_category().message(code); }

std::string describe(const char* verb, std::uint64_t offset, std::uint64_t length) {
    if (length == 0) return verb;
    return std::string(verb) + " " + std::to_string(length) + " bytes at " + std::to_string(offset);
}

}  // namespace zinf::aio
