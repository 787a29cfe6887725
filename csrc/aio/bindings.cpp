// zinf._aio: addresses, lengths, tickets. No tensors, no policy, no logging; zinf/aio/native.py is what callers see.
//
// [Note: who drops an owner] The object that keeps memory alive while I/O is in flight must be released with the GIL, but the last request that
// holds it completes on a thread that never takes the GIL. So that thread puts the object into the graveyard, and whoever next holds
// the GIL here (any wait, done, submit, stats, close, or the interpreter's pending call) buries it. An owner is in the graveyard
// before its request reads as done: after wait() it is released.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <climits>

#include "backend.h"
#include "buffer.h"
#include "check.h"

namespace py = pybind11;

namespace zinf::aio {
namespace {

class Graveyard {
public:
    static Graveyard& get() {
        static auto* graveyard = new Graveyard;  // never destroyed: threads may outlive static destruction
        return *graveyard;
    }
    // Any thread, no GIL.
    void lay(void* object) {
        bool first;
        {
            std::lock_guard lock(mutex_);
            first = objects_.empty();
            objects_.push_back(static_cast<PyObject*>(object));
        }
        if (first) Py_AddPendingCall([](void*) { return get().bury(), 0; }, nullptr);  // a full list is no harm: the next call here buries
    }
    // With the GIL.
    void bury() {
        std::vector<PyObject*> objects;
        {
            std::lock_guard lock(mutex_);
            objects.swap(objects_);
        }
        for (PyObject* object : objects) Py_DECREF(object);
    }

private:
    std::mutex mutex_;
    std::vector<PyObject*> objects_;
};

void lay(void* object) { Graveyard::get().lay(object); }

std::shared_ptr<void> own(const py::object& object) {
    if (object.is_none()) return nullptr;
    Py_INCREF(object.ptr());
    return make_owner(object.ptr(), lay);
}

struct Timeout : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Ticket {
public:
    explicit Ticket(RequestPtr request) : request_(std::move(request)) {}

    // In slices, so that a signal handler (Ctrl-C) gets its turn on the main thread.
    void wait(std::optional<double> timeout) const {
        constexpr auto slice = std::chrono::nanoseconds(50'000'000);
        const auto start = Clock::now();
        while (!request_->done()) {
            auto patience = slice;
            if (timeout) {
                const double left = *timeout - std::chrono::duration<double>(Clock::now() - start).count();
                patience = std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(left * 1e9, static_cast<double>(slice.count()))));
                if (left <= 0) throw Timeout(request_->describe() + " of " + request_->path() + ": still in flight after " + std::to_string(*timeout) + " s");
            }
            bool done;
            {
                py::gil_scoped_release nogil;
                done = request_->wait_for(patience);
            }
            if (!done && PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
        Graveyard::get().bury();
        request_->check();
    }

    bool done() const {
        Graveyard::get().bury();
        return request_->done();
    }

    // Seconds of the steady clock, which is Python's perf_counter; nothing while it is in flight.
    std::optional<std::pair<double, double>> times() const {
        if (!request_->done()) return std::nullopt;
        const auto seconds = [](Clock::time_point t) { return std::chrono::duration<double>(t.time_since_epoch()).count(); };
        return std::pair(seconds(request_->started()), seconds(request_->ended()));
    }

    std::string repr() const { return "<zinf ticket: " + request_->describe() + (request_->done() ? ", done>" : ">"); }

private:
    RequestPtr request_;
};

// Everything is checked before anything is queued.
RequestPtr make_request(const py::handle& item, const std::shared_ptr<void>& owner) {
    const auto op = py::cast<py::tuple>(item);
    ZINF_CHECK(op.size() == 5, "an op is (\"r\" or \"w\", file, file offset, memory address, length)");
    const auto verb = py::cast<std::string>(op[0]);
    ZINF_CHECK(verb == "r" || verb == "w", "an op starts with \"r\" or \"w\", not \"" + verb + "\"");
    const Kind kind = verb == "r" ? Kind::Read : Kind::Write;
    auto file = py::cast<std::shared_ptr<File>>(op[1]);
    const auto offset = py::cast<std::uint64_t>(op[2]), address = py::cast<std::uint64_t>(op[3]), length = py::cast<std::uint64_t>(op[4]);
    const auto where = [&] { return describe(kind == Kind::Read ? "read" : "write", offset, length) + " of " + file->path; };
    ZINF_CHECK(length > 0, where() + ": nothing to do, length is 0");
    ZINF_CHECK(address != 0 && address <= UINT64_MAX - length, where() + ": impossible memory address " + std::to_string(address));
    ZINF_CHECK(offset <= INT64_MAX - std::min<std::uint64_t>(length, INT64_MAX), where() + ": beyond what a file can hold");
    ZINF_CHECK(kind == Kind::Read || file->writable, where() + ": the file was opened for reading");
    if (file->direct) {
        std::string wrong;
        if (offset % kPage) wrong += " offset";
        if (address % kPage) wrong += " address";
        if (length % kPage) wrong += " length";
        ZINF_CHECK(wrong.empty(), where() + ": O_DIRECT needs multiples of 4096; misaligned:" + wrong);
    }
    ZINF_CHECK(file->acquire(), where() + ": the file is closed");
    return std::make_shared<Request>(kind, std::move(file), offset, address, length, owner);
}

class Engine {
public:
    Engine(const std::string& backend, std::uint64_t block_size, unsigned queue_depth, unsigned threads) : pid_(::getpid()) {
        ZINF_CHECK(block_size >= kPage && block_size % kPage == 0 && block_size <= (1u << 30), "block_size must be a multiple of 4096 bytes, at most 1 GiB");
        ZINF_CHECK(queue_depth >= 1 && queue_depth <= 4096, "queue_depth must be between 1 and 4096");
        ZINF_CHECK(threads >= 1 && threads <= 1024, "threads must be between 1 and 1024");
        ZINF_CHECK(backend == "uring" || backend == "threads", "backend must be \"uring\" or \"threads\", not \"" + backend + "\"");
        py::gil_scoped_release nogil;
        const Options options{block_size, queue_depth, threads};
        backend_ = backend == "uring" ? make_ring_backend(options) : make_thread_backend(options);
    }

    ~Engine() {
        if (foreign()) {
            new std::shared_ptr<Backend>(std::move(backend_));  // a forked child has no threads to join: leave it to exit
            return;
        }
        py::gil_scoped_release nogil;
        backend_->close();
    }

    std::shared_ptr<File> open(const std::string& path, bool write, bool create, int direct) { return use().open(path, write, create, static_cast<Direct>(direct)); }

    std::string register_buffer(std::uint64_t address, std::uint64_t nbytes) {
        std::string why;
        use().register_buffer(address, nbytes, why);
        return why;
    }

    void unregister_buffer(std::uint64_t address) {
        if (!foreign()) backend_->unregister_buffer(address);
    }

    std::vector<Ticket> submit(const py::sequence& ops, const py::object& owner) {
        Backend& backend = use();
        const auto shared = own(owner);
        std::vector<RequestPtr> batch;
        batch.reserve(ops.size());
        for (const auto& op : ops) batch.push_back(make_request(op, shared));
        return send(backend, std::move(batch));
    }

    Ticket datasync(const std::shared_ptr<File>& file) {
        Backend& backend = use();
        ZINF_CHECK(file->acquire(), "datasync of " + file->path + ": the file is closed");
        return send(backend, {std::make_shared<Request>(Kind::Datasync, file, 0, 0, 0, nullptr)}).front();
    }

    py::dict stats() {
        Graveyard::get().bury();
        Stats& stats = backend_->stats();
        py::dict out;
        for (const auto& [name, value] : {std::pair("bytes_read", &stats.bytes_read), {"bytes_written", &stats.bytes_written}, {"ops_read", &stats.ops_read},
                                          {"ops_written", &stats.ops_written}, {"ops_datasync", &stats.ops_datasync}, {"retries", &stats.retries},
                                          {"short", &stats.shorts}, {"errors", &stats.errors}, {"pieces", &stats.pieces}, {"pieces_fixed", &stats.fixed}})
            out[name] = value->load();
        out["in_flight"] = stats.in_flight();
        out["busy_seconds"] = stats.busy_seconds();
        out["registered_bytes"] = backend_->registered_bytes();
        return out;
    }

    py::dict report() {
        const Report report = backend_->report();
        py::dict out;
        out["setup_flags"] = report.setup_flags;
        for (const auto& [name, value] : report.numbers) out[name.c_str()] = value;
        for (const auto& [name, why] : report.notes) out[name.c_str()] = why;
        return out;
    }

    // Rules as tuples: (kinds of "rwd", path, nth, probability, seed, times, errno, short, delay_ms); zinf/aio/faults.py makes them.
    void arm(const std::vector<std::tuple<std::string, std::string, std::uint64_t, double, std::uint64_t, std::uint64_t, int, std::uint64_t, std::uint32_t>>& rules) {
        std::vector<Rule> armed;
        for (const auto& [kinds, path, nth, probability, seed, times, error, limit, delay] : rules) {
            Rule rule;
            for (int kind = 0; kind < 3; ++kind) rule.kinds[kind] = kinds.find("rwd"[kind]) != std::string::npos;
            rule.path = path;
            rule.nth = nth;
            rule.probability = probability;
            rule.seed = seed;
            rule.times = times;
            rule.fate = {error, limit, delay};
            armed.push_back(std::move(rule));
        }
        backend_->faults().arm(std::move(armed));
    }

    std::vector<std::uint64_t> fired() const { return backend_->faults().fired(); }

    void close() {
        if (foreign()) return;
        {
            py::gil_scoped_release nogil;
            backend_->close();
        }
        Graveyard::get().bury();
    }

private:
    bool foreign() const { return ::getpid() != pid_; }

    Backend& use() const {
        if (foreign()) throw ClosedError("the I/O engine belongs to the process that made it; open another one after fork()");
        backend_->check_open();
        return *backend_;
    }

    static std::vector<Ticket> send(Backend& backend, std::vector<RequestPtr> batch) {
        std::vector<Ticket> tickets(batch.begin(), batch.end());
        {
            py::gil_scoped_release nogil;
            backend.submit(std::move(batch));
        }
        Graveyard::get().bury();
        return tickets;
    }

    const pid_t pid_;
    std::shared_ptr<Backend> backend_;
};

void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const IoError& error) {  // CPython picks the subclass (FileNotFoundError, PermissionError) by errno
        PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code(), error.what(), error.path().empty() ? py::object(py::none()) : py::str(error.path())).ptr());
    } catch (const ClosedError& error) {
        PyErr_SetString(py::module_::import("zinf.errors").attr("EngineError").ptr(), error.what());
    } catch (const Timeout& error) {
        PyErr_SetString(PyExc_TimeoutError, error.what());
    }
}

}  // namespace
}  // namespace zinf::aio

PYBIND11_MODULE(_aio, m) {
    using namespace zinf::aio;
    using nogil = py::call_guard<py::gil_scoped_release>;
    m.doc() = "I/O engine: io_uring, or a pool of threads.";
    m.attr("have_liburing") = built_with_liburing();
    py::register_local_exception_translator(translate);

    py::class_<File, std::shared_ptr<File>>(m, "File")
        .def_readonly("path", &File::path)
        .def_readonly("writable", &File::writable)
        .def_readonly("direct", &File::direct)
        .def_readonly("note", &File::note)
        .def_property_readonly("fd", &File::fd)
        .def_property_readonly("closed", &File::closed)
        .def("close", &File::close, nogil())
        .def("__enter__", [](std::shared_ptr<File> self) { return self; })
        .def("__exit__", [](File& self, const py::args&) { self.close(); }, nogil());

    py::class_<Ticket>(m, "Ticket")
        .def("wait", &Ticket::wait, py::arg("timeout") = py::none())
        .def("done", &Ticket::done)
        .def_property_readonly("times", &Ticket::times)
        .def("__repr__", &Ticket::repr);

    py::class_<Engine>(m, "Engine")
        .def(py::init<std::string, std::uint64_t, unsigned, unsigned>(), py::arg("backend"), py::arg("block_size"), py::arg("queue_depth"), py::arg("threads"))
        .def("open", &Engine::open, nogil(), py::arg("path"), py::arg("write"), py::arg("create"), py::arg("direct"))
        .def("register", &Engine::register_buffer, nogil(), py::arg("address"), py::arg("nbytes"))
        .def("unregister", &Engine::unregister_buffer, nogil(), py::arg("address"))
        .def("submit", &Engine::submit, py::arg("ops"), py::arg("owner") = py::none())
        .def("datasync", &Engine::datasync, py::arg("file"))
        .def("stats", &Engine::stats)
        .def("report", &Engine::report)
        .def("arm", &Engine::arm, py::arg("rules"))
        .def("fired", &Engine::fired)
        .def("close", &Engine::close);
}
