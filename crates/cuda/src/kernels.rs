//! Kernels by their source: compiled once, kept on disk, loaded once.

use crate::driver::{DYNAMIC_SHARED_BYTES, Handle};
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::kernel_cache::{CacheKind, KernelCache};
use crate::nvrtc::{Nvrtc, architecture, whole_text};
use kolo_base::lock;
use kolo_graph::cuda::{CudaSource, Launch};
use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Dynamic shared memory that a kernel has without asking for more.
const SHARED_BYTES: usize = 48 * 1024;

/// Which source: a hash of all that the machine code depends on.
type SourceKey = [u8; 32];

/// The kernels of one GPU.
#[derive(Debug)]
pub(crate) struct Kernels {
    arch: String,
    driver_version: i32,
    compiler: fn() -> Result<&'static Nvrtc, CudaError>,
    cache: fn() -> Option<KernelCache>,
    modules: Mutex<HashMap<SourceKey, Module>>,
}

/// A loaded source and those of its kernels that were asked for.
#[derive(Debug)]
struct Module {
    handle: Handle,
    functions: BTreeMap<String, Handle>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Module {}

impl Kernels {
    pub fn new(capability: (u32, u32), driver_version: i32) -> Self {
        let modules = Mutex::new(HashMap::new());
        let (compiler, cache) = (Nvrtc::get, (|| KernelCache::of_user(CacheKind::Kernel)) as fn() -> _);
        Self { arch: architecture(capability), driver_version, compiler, cache, modules }
    }

    /// Those of another compiler, of which nothing is kept on disk.
    #[cfg(test)]
    pub fn of_compiler(compiler: fn() -> Result<&'static Nvrtc, CudaError>) -> Self {
        Self { compiler, cache: || None, ..Self::new((9, 0), 0) }
    }

    fn key(&self, nvrtc: &Nvrtc, text: &str) -> SourceKey {
        let mut hasher = blake3::Hasher::new();
        for part in [text, &self.arch, &nvrtc.settings(), &self.driver_version.to_string()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        *hasher.finalize().as_bytes()
    }

    /// The whole texts of these sources, each once.
    fn texts<'s>(&self, nvrtc: &Nvrtc, sources: impl Iterator<Item = &'s CudaSource>) -> BTreeMap<SourceKey, String> {
        let text = |source| {
            let text = whole_text(source);
            (self.key(nvrtc, &text), text)
        };
        sources.map(text).collect()
    }

    /// Compiles all sources, without a GPU; how many there are.
    pub fn compile<'s>(&self, sources: impl Iterator<Item = &'s CudaSource>) -> Result<usize, CudaError> {
        let nvrtc = (self.compiler)()?;
        let wanted: Vec<(SourceKey, String)> = self.texts(nvrtc, sources).into_iter().collect();
        self.compile_all(nvrtc, None, &wanted).into_iter().try_for_each(|made| made.map(|_| ()))?;
        Ok(wanted.len())
    }

    /// Compiles and loads all sources that are not loaded yet, several at a time.
    pub fn prepare<'s>(&self, gpu: &Gpu, sources: impl Iterator<Item = &'s CudaSource>) -> Result<(), CudaError> {
        let nvrtc = (self.compiler)()?;
        let mut wanted = self.texts(nvrtc, sources);
        wanted.retain(|key, _| !lock(&self.modules).contains_key(key));
        let wanted: Vec<(SourceKey, String)> = wanted.into_iter().collect();
        let cache = (self.cache)();
        let made = self.compile_all(nvrtc, cache.as_ref(), &wanted);
        gpu.enter()?;
        for ((key, _), code) in wanted.iter().zip(made) {
            let mut handle = std::ptr::null_mut();
            let code = code?;
            // SAFETY: machine code of NVRTC's; the driver copies it.
            let outcome = unsafe { (gpu.driver.module_load)(&mut handle, code.as_ptr().cast()) };
            if let (Err(_), Some(cache)) = (gpu.check("cuModuleLoadData", outcome), &cache) {
                // What lies there is of no use, whatever its checksum says.
                cache.remove(key);
            }
            gpu.check("cuModuleLoadData", outcome)?;
            lock(&self.modules).insert(*key, Module { handle, functions: BTreeMap::new() });
        }
        if let Some(cache) = &cache {
            cache.trim();
        }
        Ok(())
    }

    /// The machine code of each.
    fn compile_all(
        &self,
        nvrtc: &Nvrtc,
        cache: Option<&KernelCache>,
        wanted: &[(SourceKey, String)],
    ) -> Vec<Result<Vec<u8>, CudaError>> {
        let next = AtomicUsize::new(0);
        let made: Vec<Mutex<Option<Result<Vec<u8>, CudaError>>>> = wanted.iter().map(|_| Mutex::new(None)).collect();
        let work = || {
            while let Some((at, (key, text))) = {
                let at = next.fetch_add(1, Ordering::Relaxed);
                wanted.get(at).map(|wanted| (at, wanted))
            } {
                let found = cache.and_then(|cache| cache.read(key));
                let code = found.map_or_else(
                    || {
                        let code = nvrtc.compile(text, &self.arch)?;
                        if let Some(cache) = cache {
                            cache.write(key, &code);
                        }
                        Ok(code)
                    },
                    Ok,
                );
                *lock(&made[at]) = Some(code);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(wanted.len());
        std::thread::scope(|scope| {
            // If the system refuses a thread, the others do its work.
            let helpers: Vec<_> = (1..threads)
                .map_while(|_| std::thread::Builder::new().name("kolo-nvrtc".into()).spawn_scoped(scope, work).ok())
                .collect();
            work();
            drop(helpers);
        });
        let missing = || CudaError::Other("a kernel was not compiled: a compiling thread ended early".into());
        made.into_iter().map(|made| lock(&made).take().unwrap_or_else(|| Err(missing()))).collect()
    }

    /// The kernel of a launch, whose source was prepared.
    pub fn function(&self, gpu: &Gpu, launch: &Launch) -> Result<Handle, CudaError> {
        let key = self.key((self.compiler)()?, &whole_text(&launch.source));
        let mut modules = lock(&self.modules);
        let missing = || CudaError::Other(format!("kernel `{}` was not prepared", launch.function));
        let module = modules.get_mut(&key).ok_or_else(missing)?;
        if let Some(function) = module.functions.get(&*launch.function) {
            return allow_shared(gpu, *function, launch.shared_bytes);
        }
        let name = CString::new(&*launch.function).map_err(|_| missing())?;
        let mut function = std::ptr::null_mut();
        gpu.enter()?;
        // SAFETY: a module of this context and a name that ends in a zero.
        let code = unsafe { (gpu.driver.module_function)(&mut function, module.handle, name.as_ptr()) };
        gpu.check("cuModuleGetFunction", code)
            .map_err(|error| CudaError::Other(format!("kernel `{}`: {error}", launch.function)))?;
        module.functions.insert(launch.function.to_string(), function);
        allow_shared(gpu, function, launch.shared_bytes)
    }
}

/// Lets a kernel have as much shared memory as it wants.
fn allow_shared(gpu: &Gpu, function: Handle, bytes: usize) -> Result<Handle, CudaError> {
    if bytes > SHARED_BYTES {
        // SAFETY: a kernel of this context.
        let code = unsafe { (gpu.driver.function_attribute)(function, DYNAMIC_SHARED_BYTES, bytes as i32) };
        gpu.check("cuFuncSetAttribute", code)?;
    }
    Ok(function)
}
