//! `kolo bench device`: measures the cores at hand as a device of the planner's table.

use crate::args::BenchDevice;
use crate::fail::{Failure, check_writable, write_file};
use crate::load;
use crate::output::println;
use kolo_plan::device_bench::{DeviceRow, as_toml, device_of, measure};

pub fn device(args: &BenchDevice) -> Result<(), Failure> {
    let threads = load::threads_of(args.threads)?;
    args.write.as_deref().map_or(Ok(()), check_writable)?;
    if args.name.is_empty() || !args.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)) {
        let message = format!("--name {:?} is no name of a device", args.name);
        return Err(Failure::usage(message, "use letters, digits, - and _"));
    }
    let rows = measure(threads);
    println!("{:<24} {:>20} {:>14}", "work", "shape", "rate");
    for DeviceRow { work, shape, rate } in &rows {
        let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
        let unit = if *work == "stream" { "GB/s" } else { "GFLOP/s" };
        println!("{work:<24} {:>20} {:>8.1} {unit}", shape.join(" × "), rate / 1e9);
    }
    let memory = kolo_train::memory_check::host_bytes().unwrap_or(0) as f64;
    let device = device_of(&args.name, &rows, memory.max(1.0));
    let text = as_toml(&device);
    match &args.write {
        Some(path) => {
            write_file(path, text)?;
            println!("wrote [{}] to {}", args.name, path.display());
            Ok(())
        }
        None => {
            println!("{text}");
            Ok(())
        }
    }
}
