// The native driver: programs, methods and their bindings over the C++ SDK of the executorch wheel.
//
// It links the runtime only. Kernels and delegates are libraries that register themselves when
// Python opens them, into the one registry that this file and ExecuTorch's own bindings share.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#ifndef __linux__
#include <executorch/extension/data_loader/mmap_data_loader.h>
#endif
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/data_loader.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/util/dim_order_util.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;
namespace rt = executorch::runtime;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::extension::MallocMemoryAllocator;
#ifndef __linux__
using executorch::extension::MmapDataLoader;
#endif
using rt::Error;
using rt::EValue;
using rt::Span;
using Shape = std::vector<int64_t>;

#ifdef STATICLM_HAS_THREADPOOL
// The wheel ships the library of the thread pool but not its header.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(uint32_t count);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool
#endif

namespace {

// ---- errors ---------------------------------------------------------------------------------

// ExecuTorch returns a code and logs the reason. The reason is collected per thread while one of
// our calls runs; outside of them messages go to standard error, as they do without us.
thread_local bool collecting = false;
thread_local std::string collected;
constexpr size_t kMaxLog = 4000;

void emit_log(et_timestamp_t, et_pal_log_level_t level, const char* file, const char*, size_t line,
              const char* message, size_t) {
  if (!collecting || level == kFatal) {
    std::fprintf(stderr, "[%s:%zu] %s\n", file, line, message);
    return;
  }
  // After a failed kernel come lines on the types of its arguments, which say nothing to a user.
  if (level == kError && collected.size() < kMaxLog && std::strncmp(message, "arg ", 4) != 0) {
    if (!collected.empty()) collected += "; ";
    collected += message;
  }
}

// The log goes to whoever registered last, and ExecuTorch's own bindings register when they are
// imported, at any time. Registering again warns of itself, which is collected and dropped here.
void take_log() {
  if (rt::get_pal_impl()->emit_log_message != emit_log)
    rt::register_pal(rt::PalImpl::create(emit_log, "staticlm/native.cpp"));
}

struct Collect {
  Collect() {
    collecting = true;
    take_log();
    collected.clear();
  }
  ~Collect() { collecting = false; }
};

struct ExecuTorchError : std::runtime_error {
  Error code;
  std::string log;
  ExecuTorchError(Error code, const std::string& what)
      : std::runtime_error(what + ": " + rt::to_string(code)), code(code), log(collected) {}
};

struct BusyError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(Error error, const std::string& what) {
  if (error != Error::Ok) throw ExecuTorchError(error, what);
}

template <class T>
T unwrap(rt::Result<T>&& result, const std::string& what) {
  if (!result.ok()) throw ExecuTorchError(result.error(), what);
  return std::move(result.get());
}

std::string slot_name(const char* direction, size_t index) {
  return std::string(direction) + " " + std::to_string(index);
}

// ---- program --------------------------------------------------------------------------------

#ifdef __linux__
// The whole file, mapped once for as long as the program lives. What a delegate is given points into it.
class MappedFile : public rt::DataLoader {
 public:
  static std::unique_ptr<MappedFile> open(const std::string& path) {
    int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw ExecuTorchError(Error::AccessFailed, "open");
    struct stat found {};
    void* base = MAP_FAILED;
    if (::fstat(file, &found) == 0 && found.st_size > 0)
      base = ::mmap(nullptr, found.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    ::close(file);
    if (base == MAP_FAILED) throw ExecuTorchError(Error::AccessFailed, "map");
    return std::unique_ptr<MappedFile>(
        new MappedFile(static_cast<const uint8_t*>(base), static_cast<size_t>(found.st_size)));
  }
  ~MappedFile() override { ::munmap(const_cast<uint8_t*>(base_), nbytes_); }

  rt::Result<rt::FreeableBuffer> load(size_t offset, size_t nbytes,
                                      const SegmentInfo&) const override {
    if (offset > nbytes_ || nbytes > nbytes_ - offset) return Error::InvalidArgument;
    return rt::FreeableBuffer(base_ + offset, nbytes, /*free_fn=*/nullptr);
  }
  rt::Result<size_t> size() const override { return nbytes_; }

  // Takes the file's pages out of this process's memory. Nothing can have written to them, and one that
  // is needed again is read again, from the system's cache.
  void drop_pages() const { ::madvise(const_cast<uint8_t*>(base_), nbytes_, MADV_DONTNEED); }

 private:
  MappedFile(const uint8_t* base, size_t nbytes) : base_(base), nbytes_(nbytes) {}
  const uint8_t* base_;
  size_t nbytes_;
};

// Drops a file's pages again and again while it lives. Packing reads each weight once, but a delegate
// holds all of them until the last is packed: the file and its packed copy would both be resident.
class Trimmer {
 public:
  explicit Trimmer(const MappedFile& file) : worker([this, &file] {
    std::unique_lock<std::mutex> lock(mutex);
    while (!wake.wait_for(lock, std::chrono::milliseconds(5), [this] { return done; }))
      file.drop_pages();
    file.drop_pages();
  }) {}
  Trimmer(const Trimmer&) = delete;
  Trimmer& operator=(const Trimmer&) = delete;
  ~Trimmer() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      done = true;
    }
    wake.notify_one();
    worker.join();
  }

 private:
  std::mutex mutex;
  std::condition_variable wake;
  bool done = false;
  std::thread worker;  // last: it uses the others
};
using Loader = MappedFile;
#else
using Loader = MmapDataLoader;
#endif

struct Program {
  std::unique_ptr<Loader> loader;  // outlives `program`
  std::unique_ptr<rt::Program> program;

  explicit Program(const std::string& path) {
    Collect scope;
#ifdef __linux__
    loader = MappedFile::open(path);
#else
    loader = std::make_unique<MmapDataLoader>(
        unwrap(MmapDataLoader::from(path.c_str(), MmapDataLoader::MlockConfig::NoMlock), "open"));
#endif
    program = std::make_unique<rt::Program>(unwrap(
        rt::Program::load(loader.get(), rt::Program::Verification::InternalConsistency), "load"));
  }
};

// ---- method ---------------------------------------------------------------------------------

// What `set_input` reads a tensor's type, shape and address from.
struct Input {
  executorch::aten::ScalarType dtype = executorch::aten::ScalarType::Undefined;
  std::vector<executorch::aten::SizesType> sizes;
  std::vector<executorch::aten::DimOrderType> dim_order;
  std::vector<executorch::aten::StridesType> strides;
  std::unique_ptr<TensorImpl> tensor;
  bool is_tensor = false;
  bool planned = false;

  void reshape(const Shape& shape) {
    sizes.assign(shape.begin(), shape.end());
    strides.resize(sizes.size());
    check(rt::dim_order_to_stride(sizes.data(), dim_order.data(), sizes.size(), strides.data()),
          "dim order");
    tensor = std::make_unique<TensorImpl>(dtype, sizes.size(), sizes.data(), nullptr,
                                          dim_order.data(), strides.data());
  }
};

#ifdef __linux__
// A call beside which dropping the file's pages costs nothing.
constexpr auto kLong = std::chrono::milliseconds(50);
#endif

using Options = std::vector<std::tuple<std::string, std::string, nb::object>>;

// Value: bool, int or str.
rt::BackendOption backend_option(const std::string& key, nb::handle value) {
  rt::BackendOption option;
  if (key.empty() || key.size() >= sizeof(option.key))
    throw ExecuTorchError(Error::InvalidArgument, "option key");
  std::memcpy(option.key, key.c_str(), key.size() + 1);
  if (nb::isinstance<nb::bool_>(value)) {
    option.value = nb::cast<bool>(value);
  } else if (nb::isinstance<nb::int_>(value)) {
    option.value = nb::cast<int>(value);
  } else {
    auto text = nb::cast<std::string>(value);
    std::array<char, rt::kMaxOptionValueLength> chars{};
    if (text.size() >= chars.size()) throw ExecuTorchError(Error::InvalidArgument, "option value");
    std::memcpy(chars.data(), text.data(), text.size());
    option.value = chars;
  }
  return option;
}

struct Method {
  // Members are destroyed from the last to the first: the method before the memory it is bound to,
  // and the program last. Delegates may touch bound memory while they are torn down.
  std::shared_ptr<Program> program;
  std::vector<nb::object> arena_owners;
  std::vector<Span<uint8_t>> arenas;
  MallocMemoryAllocator method_memory, temporary_memory;
  std::unique_ptr<rt::HierarchicalAllocator> planned_memory;
  std::unique_ptr<rt::MemoryManager> memory;
  std::map<std::string, std::vector<rt::BackendOption>> options;
  rt::LoadBackendOptionsMap options_by_backend;
  std::vector<Input> inputs;
  std::vector<nb::object> input_owners, output_owners;
  std::unique_ptr<rt::Method> method;
  std::mutex mutex;
  std::string name;

  // `place(index, nbytes) -> (address, owner)` is called once for each planned arena. `backend_options`
  // (backend, key, value) hold for the loading of this method only.
  Method(std::shared_ptr<Program> from, const std::string& method_name, nb::callable place,
         const Options& backend_options)
      : program(std::move(from)), name(method_name) {
    Collect scope;
    for (const auto& [backend, key, value] : backend_options)
      options[backend].push_back(backend_option(key, value));
    for (auto& [backend, values] : options)
      check(options_by_backend.set_options(backend.c_str(),
                                           Span<rt::BackendOption>(values.data(), values.size())),
            backend);
    auto meta = unwrap(program->program->method_meta(name.c_str()), "method_meta");
    for (size_t i = 0; i < meta.num_memory_planned_buffers(); ++i) {
      auto nbytes = static_cast<size_t>(unwrap(meta.memory_planned_buffer_size(i), "arena size"));
      auto [address, owner] = nb::cast<std::tuple<uintptr_t, nb::object>>(place(i, nbytes));
      if (!address && nbytes) throw ExecuTorchError(Error::MemoryAllocationFailed, "arena");
      arenas.emplace_back(reinterpret_cast<uint8_t*>(address), nbytes);
      arena_owners.push_back(std::move(owner));
    }
    planned_memory = std::make_unique<rt::HierarchicalAllocator>(
        Span<Span<uint8_t>>(arenas.data(), arenas.size()));
    memory = std::make_unique<rt::MemoryManager>(&method_memory, planned_memory.get(),
                                                 &temporary_memory);
    {
      nb::gil_scoped_release unlocked;  // packing weights may take seconds
#ifdef __linux__
      Trimmer trimmer(*program->loader);
#endif
      method = std::make_unique<rt::Method>(
          unwrap(program->program->load_method(name.c_str(), memory.get(), nullptr, nullptr,
                                               &options_by_backend),
                 "load_method"));
    }
    meta = method->method_meta();
    inputs.resize(meta.num_inputs());
    input_owners.resize(inputs.size());
    output_owners.resize(meta.num_outputs());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (unwrap(meta.input_tag(i), "input tag") != rt::Tag::Tensor) continue;
      auto info = unwrap(meta.input_tensor_meta(i), "input");
      Input& input = inputs[i];
      input.is_tensor = true;
      input.planned = info.is_memory_planned();
      input.dtype = info.scalar_type();
      input.dim_order.assign(info.dim_order().begin(), info.dim_order().end());
      input.reshape(Shape(info.sizes().begin(), info.sizes().end()));
    }
  }

  // Never waits with the GIL held: a method that is busy on another thread is a caller's fault.
  std::unique_lock<std::mutex> claim() {
    std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    if (!lock) throw BusyError("method " + name + " is executing on another thread");
    if (!method) throw BusyError("method " + name + " is closed");
    return lock;
  }

  // Unplanned: the method reads and writes `address` from now on. Planned: copied by each `execute`.
  // The caller has checked the size of the memory.
  void set_input(size_t index, uintptr_t address, const std::optional<Shape>& shape,
                 nb::object owner) {
    auto lock = claim();
    Collect scope;
    if (index >= inputs.size() || !inputs[index].is_tensor)
      throw ExecuTorchError(Error::InvalidArgument, slot_name("input", index));
    Input& input = inputs[index];
    void* old_data = input.tensor->mutable_data();
    auto old_sizes = input.sizes;
    if (shape) input.reshape(*shape);
    input.tensor->set_data(reinterpret_cast<void*>(address));
    Error error = method->set_input(EValue(Tensor(input.tensor.get())), index);
    if (error != Error::Ok) {
      input.reshape(Shape(old_sizes.begin(), old_sizes.end()));
      input.tensor->set_data(old_data);
    }
    check(error, slot_name("input", index));
    std::swap(input_owners[index], owner);  // the old owner goes only now: nothing points at it
  }

  void set_output(size_t index, uintptr_t address, size_t nbytes, nb::object owner) {
    auto lock = claim();
    Collect scope;
    check(method->set_output_data_ptr(reinterpret_cast<void*>(address), nbytes, index),
          slot_name("output", index));
    std::swap(output_owners[index], owner);
  }

  void execute() {
    auto lock = claim();
    Error error = Error::Ok;
    Collect scope;
    {
      nb::gil_scoped_release unlocked;
      for (size_t i = 0; i < inputs.size() && error == Error::Ok; ++i)
        if (inputs[i].planned) error = method->set_input(EValue(Tensor(inputs[i].tensor.get())), i);
      auto begun = std::chrono::steady_clock::now();
      if (error == Error::Ok) error = method->execute();
#ifdef __linux__
      // Rows of a table that were looked up bring pages along that nobody asked for.
      if (std::chrono::steady_clock::now() - begun > kLong) program->loader->drop_pages();
#endif
    }
    check(error, name);
  }

  // Where an output is now, and its shape.
  std::tuple<uintptr_t, Shape> output(size_t index) {
    auto lock = claim();
    if (index >= output_owners.size() || !method->get_output(index).isTensor())
      throw ExecuTorchError(Error::InvalidArgument, slot_name("output", index));
    const Tensor& tensor = method->get_output(index).toTensor();
    return {reinterpret_cast<uintptr_t>(tensor.const_data_ptr()),
            Shape(tensor.sizes().begin(), tensor.sizes().end())};
  }

  // The first output that is the same value: such outputs cannot be placed separately.
  size_t first_twin(size_t index) {
    auto lock = claim();
    for (size_t i = 0; i < index; ++i)
      if (&method->get_output(i) == &method->get_output(index)) return i;
    return index;
  }

  void close() {
    if (!method) return;
    std::vector<nb::object> dead;  // dropped after the lock: that may run any Python code
    auto lock = claim();
    method.reset();
    for (auto* owners : {&input_owners, &output_owners, &arena_owners}) {
      for (nb::object& owner : *owners) dead.push_back(std::move(owner));
      owners->clear();
    }
    program.reset();
  }
};

// Owners are Python objects; the collector must see them to break a cycle through one of them.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  auto* method = nb::inst_ptr<Method>(self);
  for (auto* owners : {&method->arena_owners, &method->input_owners, &method->output_owners})
    for (nb::object& owner : *owners) Py_VISIT(owner.ptr());
  return 0;
}

int clear(PyObject* self) {
  try {
    if (nb::inst_ready(self)) nb::inst_ptr<Method>(self)->close();
  } catch (const BusyError&) {  // an executing method is not garbage: its caller holds it
  }
  return 0;
}

PyType_Slot method_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                              {Py_tp_clear, reinterpret_cast<void*>(clear)},
                              {0, nullptr}};

// ---- runtime --------------------------------------------------------------------------------

std::vector<std::string> backends() {
  std::vector<std::string> names;
  for (size_t i = 0; i < rt::get_num_registered_backends(); ++i)
    names.emplace_back(unwrap(rt::get_backend_name(i), "backend name"));
  return names;
}

bool backend_available(const std::string& name) {
  Collect scope;
  auto* backend = rt::get_backend_class(name.c_str());
  return backend != nullptr && backend->is_available();
}

std::vector<std::string> operators() {
  std::vector<std::string> names;
  for (const auto& kernel : rt::get_registered_kernels()) names.emplace_back(kernel.name_);
  return names;
}

// Most backends read their options when a method is loaded.
void set_backend_option(const std::string& backend, const std::string& key, nb::object value) {
  Collect scope;
  rt::BackendOption option = backend_option(key, value);
  check(rt::set_option(backend.c_str(), Span<rt::BackendOption>(&option, 1)), backend + "." + key);
}

size_t threads() {
#ifdef STATICLM_HAS_THREADPOOL
  auto* pool = executorch::extension::threadpool::get_threadpool();
  return pool ? pool->get_thread_count() : 1;
#else
  return 0;
#endif
}

bool set_threads(uint32_t count) {
#ifdef STATICLM_HAS_THREADPOOL
  auto* pool = executorch::extension::threadpool::get_threadpool();
  return pool && pool->_unsafe_reset_threadpool(count);
#else
  return false;
#endif
}

}  // namespace

NB_MODULE(_native, m) {
  rt::runtime_init();
  { Collect scope; }

  // Never freed: exceptions may be raised until the interpreter is gone.
  static auto* error_type = new nb::object(nb::steal(
      PyErr_NewException("staticlm.runtime._native.ExecuTorchError", PyExc_RuntimeError, nullptr)));
  static auto* busy_type = new nb::object(nb::steal(
      PyErr_NewException("staticlm.runtime._native.BusyError", PyExc_RuntimeError, nullptr)));
  m.attr("ExecuTorchError") = *error_type;
  m.attr("BusyError") = *busy_type;
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const ExecuTorchError& error) {
      nb::object value = (*error_type)(error.what());
      value.attr("code") = static_cast<unsigned>(error.code);
      value.attr("code_name") = rt::to_string(error.code);
      value.attr("log") = error.log;
      PyErr_SetObject(error_type->ptr(), value.ptr());
    } catch (const BusyError& error) {
      PyErr_SetString(busy_type->ptr(), error.what());
    }
  });

  m.attr("built_against") = STATICLM_BUILT_AGAINST;
#ifdef STATICLM_HAS_THREADPOOL
  m.attr("has_threadpool") = true;
#else
  m.attr("has_threadpool") = false;
#endif
  m.def("backends", &backends);
  m.def("backend_available", &backend_available, "name"_a);
  m.def("operators", &operators);
  m.def("set_backend_option", &set_backend_option, "backend"_a, "key"_a, "value"_a);
  m.def("threads", &threads);
  m.def("set_threads", &set_threads, "count"_a);

  nb::class_<Program>(m, "Program").def(nb::init<const std::string&>(), "path"_a);
  nb::class_<Method>(m, "Method", nb::type_slots(method_slots))
      .def(nb::init<std::shared_ptr<Program>, const std::string&, nb::callable, const Options&>(),
           "program"_a, "name"_a, "place"_a, "options"_a = Options())
      .def("set_input", &Method::set_input, "index"_a, "address"_a, "shape"_a.none(), "owner"_a.none())
      .def("set_output", &Method::set_output, "index"_a, "address"_a, "nbytes"_a, "owner"_a.none())
      .def("execute", &Method::execute)
      .def("output", &Method::output, "index"_a)
      .def("first_twin", &Method::first_twin, "index"_a)
      .def("close", &Method::close);
}
