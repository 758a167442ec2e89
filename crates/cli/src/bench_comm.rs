//! `kolo bench comm`: times collectives, one row per size, as the OSU and NCCL tests do.

use crate::args::BenchComm;
use crate::bench_nccl;
use crate::device;
use crate::fail::{Failure, check_writable, write_file};
use crate::flags;
use crate::manifest::Agreement;
use crate::output::{self, println};
use crate::progress::Progress;
use crate::transports::{self, TransportKind};
use crate::workers::{self, JoinedRank};
use kolo_cluster::{Introduction, Launcher, RankInfo};
use kolo_comm::bench::{self, BenchRow, Method};
use kolo_comm::mpi::MpiWorld;
use kolo_comm::{CallKind, Communicator, Fault};
use kolo_plan::collective::CollectiveKind;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

const BYTES_MAX: usize = 16 << 30;

pub fn comm(args: &BenchComm) -> Result<(), Failure> {
    let rank_info = workers::rank_info()?;
    let prepared = prepare(args, rank_info.as_ref());
    let (kinds, sizes) = workers::or_fail_all(prepared, rank_info.as_ref(), &args.workers)?;
    let Some(rank_info) = rank_info else {
        let count = workers::asked(&args.workers)?;
        if count == 1 && args.workers.transport.joins_devices() {
            let rows = bench_nccl::sweep(&bench_nccl::alone()?, device::own_gpu()?, &kinds, &sizes, args.iterations)?;
            print_head();
            rows.iter().for_each(print_row);
            return args.report.as_deref().map_or(Ok(()), |path| write_report(path, &rows));
        }
        if count < 2 {
            return Err(Failure::usage("a collective needs at least two workers", "write -n 2"));
        }
        return workers::supervise(&args.workers, count, 0, None, Progress::plain(false), None);
    };
    let mut joined = workers::join(&rank_info, &args.workers, introduction(args))?;
    let mut table = Table { report: args.report.as_deref().filter(|_| rank_info.rank == 0), ..Table::default() };
    table.is_shown = rank_info.rank == 0;
    let outcome = measure(args, &rank_info, &mut joined, (&kinds, &sizes), &mut table);
    let JoinedRank { member, mpi } = joined;
    workers::or_fail(outcome, &member)?;
    let Table { rows, unwritten, .. } = table;
    if let Some(failure) = unwritten {
        member.fail(failure.message(), None);
        return Err(Failure::reported());
    }
    if let Some(path) = args.write.as_ref().filter(|_| member.rank == 0) {
        write_file(path, cluster_text(&rows, rank_info.world, !args.workers.transport.joins_devices()))?;
    }
    member.finish()?;
    Ok(mpi.map_or(Ok(()), MpiWorld::finish)?)
}

/// What was measured so far. Every row is printed, and in the report, as soon as it is there, so that whoever interrupts the
/// measurement keeps it.
#[derive(Default)]
struct Table<'a> {
    rows: Vec<BenchRow>,
    is_shown: bool,
    report: Option<&'a Path>,
    /// Why the report could not be written.
    unwritten: Option<Failure>,
}

impl Table<'_> {
    fn extend(&mut self, rows: Vec<BenchRow>) {
        if self.is_shown {
            if self.rows.is_empty() {
                print_head();
            }
            rows.iter().for_each(print_row);
            output::flush();
        }
        self.rows.extend(rows);
        if let Some(path) = self.report {
            self.unwritten = write_report(path, &self.rows).err();
        }
    }
}

fn write_report(path: &Path, rows: &[BenchRow]) -> Result<(), Failure> {
    let list: Vec<String> = rows.iter().map(BenchRow::json).collect();
    write_file(path, format!("[\n  {}\n]\n", list.join(",\n  ")))
}

fn introduction(args: &BenchComm) -> Introduction {
    let agreement = Agreement::on("bench comm").workers(&args.workers);
    let agreement = agreement.flag("--op", args.op.join(",")).flag("--bytes", args.bytes.join(","));
    let agreement = agreement.flag("--iterations", args.iterations).flag("--private", args.private);
    let agreement = agreement.flag("--fresh", args.fresh).flag("--started", args.started);
    Introduction { manifest: agreement.manifest(), ..Introduction::default() }
}

/// What to measure.
fn prepare(args: &BenchComm, rank_info: Option<&RankInfo>) -> Result<(Vec<CallKind>, Vec<usize>), Failure> {
    flags::check(&args.workers, rank_info, workers::asked(&args.workers)?)?;
    if rank_info.is_none_or(|rank_info| rank_info.rank == 0) {
        args.report.as_deref().map_or(Ok(()), check_writable)?;
        args.write.as_deref().map_or(Ok(()), check_writable)?;
    }
    let kinds = kinds(&args.op)?;
    if !args.workers.transport.joins_devices() {
        return Ok((kinds, sizes(&args.bytes)?));
    }
    let known = |kind: &CallKind| bench_nccl::KINDS.contains(kind);
    if let Some(other) = kinds.iter().find(|kind| !known(kind)).filter(|_| !args.op.is_empty()) {
        let names = bench_nccl::KINDS.map(CallKind::name).join(", ");
        let message = format!("--op {} is not measured over NCCL", other.name());
        return Err(Failure::usage(message, &format!("use one of {names}")));
    }
    Ok((kinds.into_iter().filter(known).collect(), sizes(&args.bytes)?))
}

fn measure(
    args: &BenchComm,
    rank_info: &RankInfo,
    joined: &mut JoinedRank,
    (kinds, sizes): (&[CallKind], &[usize]),
    table: &mut Table<'_>,
) -> Result<(), Fault> {
    let JoinedRank { member, mpi } = joined;
    let asked = args.workers.transport;
    let free = asked.link.is_none() && !asked.joins_devices() && rank_info.launcher == Launcher::Kolo;
    let transports: Vec<TransportKind> = match free && transports::can_share_memory(member)? {
        true => transports::measured_alone().collect(),
        false => vec![asked],
    };
    for transport in transports {
        let transport = transport.connect(member, mpi.as_ref(), &args.workers)?;
        let world = Arc::new(Communicator::new(transport, Arc::clone(&member.watch), true));
        if args.workers.transport.joins_devices() {
            let gpu = device::own_gpu().map_err(|failure| Fault::BadCall(failure.message().into()))?;
            table.extend(bench_nccl::sweep(&world, gpu, kinds, sizes, args.iterations)?);
            return Ok(());
        }
        // A cluster file is about steps: exchanges are started, on buffers just written, in groups of fewer ranks, too.
        let (started, fresh) = (args.started || args.write.is_some(), args.fresh || args.write.is_some());
        let method = Method { iterations: args.iterations, private: args.private, fresh, started };
        for ranks in group_sizes(world.size(), args.write.is_some()) {
            let group = match ranks == world.size() {
                true => Arc::clone(&world),
                false => Arc::new(world.split((world.rank() / ranks) as i64, world.rank() as i64)?),
            };
            for kind in kinds {
                // A barrier has no size.
                let sizes = if *kind == CallKind::Barrier { &[0][..] } else { sizes };
                table.extend(bench::sweep(&group, *kind, sizes, method)?);
            }
            world.barrier()?;
        }
    }
    Ok(())
}

/// How many ranks exchange with each other, all groups of so many at the same time; the whole world first.
fn group_sizes(world: usize, smaller: bool) -> Vec<usize> {
    let halves = std::iter::successors(Some(world), |size| size.is_multiple_of(2).then_some(size / 2));
    halves.take_while(|size| *size == world || smaller && *size > 1).collect()
}

fn print_head() {
    println!("{:<16} {:<9} {:>5} {:>12} {:>14} {:>12}", "op", "transport", "ranks", "bytes", "median µs", "bus GB/s");
}

fn print_row(row: &BenchRow) {
    println!(
        "{:<16} {:<9} {:>5} {:>12} {:>14.2} {:>12.3}",
        row.op, row.transport, row.ranks, row.bytes, row.us_median, row.busbw_gbps
    );
}

/// A cluster file of these workers: the link of the transport that was measured first.
fn cluster_text(rows: &[BenchRow], ranks: usize, of_cores: bool) -> String {
    let first = rows.first().map_or("", |row| row.transport);
    let all = || rows.iter().filter(|row| row.transport == first && row.bytes > 0);
    let own = || all().filter(|row| row.ranks == ranks);
    let reduce = || own().filter(|row| row.op == CallKind::AllReduce.name());
    let any = || reduce().chain(own());
    // Two rounds of an all-reduce: an empty one takes twice the latency, a large one sends nearly twice its bytes.
    let latency = any().map(|row| row.us_median / 2.0).fold(f64::INFINITY, f64::min);
    let bandwidth = any().map(|row| row.busbw_gbps).fold(0.0, f64::max);
    let mut text = format!(
        "# Measured by `kolo bench comm`: {ranks} workers over {first}. Put the name of your device here.\n\
         name = \"{first} of {ranks} workers\"\ndevice = \"cpu-core\"\n\n[[level]]\nname = \"host\"\ncount = {ranks}\n\
         bandwidth_gbs = {bandwidth:.4}\nshare = 1.0\nlatency_us = {latency:.3}\n"
    );
    let groups: BTreeSet<usize> = all().map(|row| row.ranks).collect();
    for (ranks, kind) in groups.iter().rev().flat_map(|ranks| CollectiveKind::ALL.map(|kind| (*ranks, kind))) {
        let of_group = all().filter(|row| row.op == kind.name() && row.ranks == ranks);
        let mut points: Vec<(usize, f64)> = of_group.map(|row| (row.bytes, row.us_median)).collect();
        points.sort_by_key(|(bytes, _)| *bytes);
        points.dedup_by_key(|(bytes, _)| *bytes);
        if !points.is_empty() {
            let [bytes, micros] = [
                points.iter().map(|(bytes, _)| bytes.to_string()).collect::<Vec<_>>(),
                points.iter().map(|(_, micros)| format!("{:.3}", micros.max(0.001))).collect(),
            ];
            let (bytes, micros) = (bytes.join(", "), micros.join(", "));
            text += &format!(
                "[[level.measured]]\nop = \"{}\"\nranks = {ranks}\nbytes = [{bytes}]\nus = [{micros}]\n",
                kind.name()
            );
        }
    }
    if of_cores {
        text += "# A core computes or exchanges. Delete this where workers leave cores free.\n\
                 [system]\noverlaps_gradients = false\noverlaps_layers = false\noverlaps_gathers = false\n";
    }
    text
}

fn kinds(names: &[String]) -> Result<Vec<CallKind>, Failure> {
    let all = || CallKind::ALL.into_iter().filter(|kind| *kind != CallKind::Recv);
    if names.is_empty() {
        return Ok(all().collect());
    }
    let find = |name: &String| {
        all().find(|kind| kind.name() == name).ok_or_else(|| {
            let known: Vec<&str> = all().map(CallKind::name).collect();
            Failure::usage(format!("--op {name} is not a collective"), &format!("use one of {}", known.join(", ")))
        })
    };
    names.iter().map(find).collect()
}

fn sizes(texts: &[String]) -> Result<Vec<usize>, Failure> {
    let read = |text: &String| {
        let (digits, unit) = match text.chars().last() {
            Some('K' | 'k') => (&text[..text.len() - 1], 1 << 10),
            Some('M' | 'm') => (&text[..text.len() - 1], 1 << 20),
            Some('G' | 'g') => (&text[..text.len() - 1], 1 << 30),
            _ => (&text[..], 1),
        };
        let bytes = digits.parse().ok().and_then(|count: usize| count.checked_mul(unit));
        bytes.filter(|bytes| *bytes >= 4 && *bytes <= BYTES_MAX && bytes % 4 == 0).ok_or_else(|| {
            Failure::usage(format!("--bytes {text} is not a size"), "write multiples of 4 such as 4, 16K or 64M")
        })
    };
    texts.iter().map(read).collect()
}
