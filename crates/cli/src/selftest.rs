//! `kolo selftest`: whether a device computes what every op is defined to compute.

use crate::args::SelftestArgs;
use crate::fail::Failure;
use crate::output::println;
use crate::selftest_nccl;
use kolo_exec::selftest::{self, KindOutcome};
use kolo_graph::OpKind;
use kolo_graph::cuda::CudaTarget;
use std::time::Instant;

pub fn selftest(args: &SelftestArgs) -> Result<(), Failure> {
    if args.nccl {
        return selftest_nccl::selftest(args.device);
    }
    let kinds = kinds(args)?;
    if args.compile_only {
        return compile_only(&kinds);
    }
    let executor = args.device.tested()?;
    let start = Instant::now();
    let outcomes = selftest::run(&executor, &kinds, show);
    let (bad, cases) =
        (outcomes.iter().filter(|one| one.failed > 0).count(), outcomes.iter().map(count).sum::<usize>());
    let gradients: usize = outcomes.iter().map(|one| one.gradients).sum();
    println!(
        "{}: {} ops, {cases} cases and {gradients} gradients in {:.1} s, {bad} ops failed",
        executor.name(),
        outcomes.len(),
        start.elapsed().as_secs_f64()
    );
    match bad {
        0 => Ok(()),
        bad => Err(Failure::job(
            format!("{bad} ops differ from their definitions"),
            "report it with the output of `kolo devices`",
        )),
    }
}

fn kinds(args: &SelftestArgs) -> Result<Vec<OpKind>, Failure> {
    let all = kolo_ops::registry();
    if let Some(unknown) = args.op.iter().find(|name| all.iter().all(|kind| kind.name != **name)) {
        return Err(Failure::usage(format!("there is no op `{unknown}`"), "`kolo list ops` lists them"));
    }
    // What every graph is made of has no kernel of its own.
    let chosen =
        |kind: &OpKind| args.op.is_empty() && kind.cpu.is_some() || args.op.iter().any(|name| name == kind.name);
    Ok(all.into_iter().filter(chosen).collect())
}

fn compile_only(kinds: &[OpKind]) -> Result<(), Failure> {
    let start = Instant::now();
    let compiled = kolo_cuda::compile_cases(kinds, &CudaTarget::default()).map_err(|error| Failure::device(&error))?;
    let without: Vec<&str> = kinds.iter().filter(|kind| kind.cuda.is_none()).map(|kind| kind.name).collect();
    println!("{compiled} sources compile, in {:.1} s", start.elapsed().as_secs_f64());
    if !without.is_empty() {
        println!("without a GPU side: {}", without.join(" "));
    }
    Ok(())
}

fn count(outcome: &KindOutcome) -> usize {
    outcome.cases.iter().map(|(_, count)| count).sum()
}

fn show(outcome: &KindOutcome) {
    let mut cases: Vec<String> =
        outcome.cases.iter().map(|(dtype, count)| format!("{} {count}", dtype.name())).collect();
    if outcome.gradients > 0 {
        cases.push(format!("gradients {}", outcome.gradients));
    }
    let verdict = match outcome.failed {
        0 => format!("ok, at most {:.2} of the tolerance", outcome.worst),
        failed => format!("{failed} FAILED"),
    };
    println!("{:<24} {:<42} {verdict}", outcome.name, cases.join(", "));
    outcome.failures.iter().for_each(|failure| println!("    {failure}"));
}
