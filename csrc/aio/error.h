// What can go wrong below Python, as exceptions. The bindings turn IoError into OSError and ClosedError into EngineError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace zinf::aio {

// errno text without the thread-unsafe strerror().
std::string errno_text(int code);

// "read 1048576 bytes at 8192"; a datasync has no range: "datasync".
std::string describe(const char* verb, std::uint64_t offset, std::uint64_t length);

// An I/O failure: becomes OSError(code, what(), path).
class IoError : public std::runtime_error {
public:
    IoError(int code, const std::string& message, std::string path) : std::runtime_error(message), code_(code), path_(std::move(path)) {}
    int code() const { return code_; }
    const std::string& path() const { return path_; }

private:
    int code_;
    std::string path_;
};

// A method was called after close().
class ClosedError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

}  // namespace zinf::aio
