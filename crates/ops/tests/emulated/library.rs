//! All kernels of all trials as one shared library that the C++ compiler makes.

use super::{CudaCall, CudaCalls, CudaSource, Launch, PRELUDE, Trial};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A kernel's entry: the number of arguments, their addresses, and the shape of the launch.
type Entry = unsafe extern "C" fn(u64, *mut *mut c_void, *const Shape);

/// The emulator's `Shape`.
#[repr(C)]
struct Shape {
    grid: *const u32,
    block: *const u32,
    dynamic_bytes: u64,
}

/// Files that the compiler takes side by side.
const FILES: usize = 2;

#[derive(Debug)]
pub struct Library {
    handle: *mut c_void,
    /// The number of each source text.
    numbers: BTreeMap<String, usize>,
}

/// A source with its definitions, as text. It leaves no macro behind: many sources stand in one file here.
pub fn text_of(source: &CudaSource) -> String {
    let defines: String = source.defines.iter().map(|(name, value)| format!("#define {name} {value}\n")).collect();
    let given = source.defines.iter().map(|(name, _)| *name);
    let own = source.text.lines().filter_map(|line| line.trim_start().strip_prefix("#define "));
    let name = |line: &str| line.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
    let ends: BTreeSet<String> = given.chain(own).map(name).collect();
    let ends: String = ends.iter().map(|name| format!("#undef {name}\n")).collect();
    format!("{defines}{}\n{ends}", source.text)
}

fn launches(calls: &CudaCalls) -> impl Iterator<Item = &Launch> {
    calls.calls.iter().filter_map(|call| match call {
        CudaCall::Launch(launch) => Some(launch),
        _ => None,
    })
}

/// Every source of the calls as a GPU's compiler gets it: prelude, definitions, kernels.
pub fn sources(calls: &CudaCalls) -> Vec<(String, String)> {
    let with_defines = |launch: &Launch| {
        let defines = launch.source.defines.iter().map(|(name, value)| format!("#define {name} {value}\n"));
        let whole = [PRELUDE.into(), defines.collect::<String>(), launch.source.text.to_string()].join("\n");
        (text_of(&launch.source), whole)
    };
    launches(calls).map(with_defines).collect()
}

/// What inline assembly stands for on a CPU.
const ASSEMBLY: [(&str, &str); 3] = [
    (r#"asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));"#, "y = half_to_float(x.bits);"),
    (r#"asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));"#, "y.bits = float_to_bfloat(x);"),
    (r#"asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));"#, "y.bits = float_to_half(x);"),
];

/// What stands for tensor cores there: the emulator has its own.
const TENSOR: &str = include_str!("../../src/tensor.cuh");

fn for_cpu(text: &str) -> String {
    let text = text.replace(TENSOR, "");
    let text = ASSEMBLY.iter().fold(text, |text, (from, to)| text.replace(from, to));
    let text = text.replace("extern \"C\" __global__", "static");
    text.replace(
        "extern __shared__ __align__(1024) unsigned char dynamic[];",
        "unsigned char *const dynamic = emulator::dynamic_memory;",
    )
}

impl Library {
    /// `None` without a compiler.
    pub fn of(trials: &[Trial]) -> Option<Self> {
        Command::new("g++").arg("--version").output().ok()?;
        let mut functions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for launch in trials.iter().flat_map(|trial| launches(&trial.calls)) {
            functions.entry(text_of(&launch.source)).or_default().insert(launch.function.to_string());
        }
        // A library that was loaded from a path is what that path stands for from then on.
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let (process, number) = (std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("emulated-{process}-{number}"));
        std::fs::create_dir_all(&folder).expect("the target folder can be written");
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated");
        let mut files = vec![String::new(); FILES];
        for (number, (text, names)) in functions.iter().enumerate() {
            let file = &mut files[number % FILES];
            file.push_str(&format!("namespace source_{number} {{\n{}}}\n", for_cpu(text)));
            for name in names {
                file.push_str(&format!(
                    "extern \"C\" void run_{number}_{name}(unsigned long count, void **args, const \
                     emulator::Shape *shape) {{ emulator::launch(source_{number}::{name}, count, args, *shape); }}\n"
                ));
            }
        }
        let prelude = for_cpu(PRELUDE);
        let objects: Vec<PathBuf> = (0..=FILES).map(|at| folder.join(format!("{at}.o"))).collect();
        let compile = |at: usize| {
            let source = folder.join(format!("{at}.cpp"));
            let text = match files.get(at) {
                Some(text) => format!("#include \"emulator.hpp\"\n{prelude}\n#include \"tensor.hpp\"\n{text}"),
                None => "#include \"emulator.cpp\"\n".into(),
            };
            std::fs::write(&source, text).expect("the target folder can be written");
            let flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-w", "-c", "-I"];
            Command::new("g++")
                .args(flags)
                .arg(&here)
                .arg(&source)
                .arg("-o")
                .arg(&objects[at])
                .spawn()
                .expect("g++ starts")
        };
        let running: Vec<_> = (0..=FILES).map(compile).collect();
        for child in running {
            let done = child.wait_with_output().expect("g++ ends");
            assert!(done.status.success(), "the kernels do not compile as C++");
        }
        let library = folder.join("kernels.so");
        let linked = Command::new("g++").arg("-shared").args(&objects).arg("-o").arg(&library).status();
        assert!(linked.is_ok_and(|status| status.success()), "the kernels do not link");
        let path = CString::new(library.to_str().expect("a path of text")).expect("no zero byte");
        // SAFETY: the library was made above, and runs nothing when it is loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the kernels do not load");
        let _ = std::fs::remove_dir_all(&folder);
        Some(Self { handle, numbers: functions.into_keys().enumerate().map(|(at, text)| (text, at)).collect() })
    }

    /// Runs a launch whose arguments lie at these addresses.
    pub fn launch(&self, launch: &Launch, mut args: Vec<*mut c_void>) {
        let number = self.numbers[&text_of(&launch.source)];
        let name = CString::new(format!("run_{number}_{}", launch.function)).expect("no zero byte");
        // SAFETY: the library is loaded.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!symbol.is_null(), "no kernel {}", launch.function);
        // SAFETY: the symbol is a function of this type, made above.
        let entry: Entry = unsafe { std::mem::transmute(symbol) };
        let shape = Shape {
            grid: launch.grid.as_ptr(),
            block: launch.block.as_ptr(),
            dynamic_bytes: launch.shared_bytes as u64,
        };
        // SAFETY: it checks the number of arguments; their sizes are the kernel's, which is what this test is about.
        unsafe { entry(args.len() as u64, args.as_mut_ptr(), &shape) }
    }
}
