//! `helix-sim`: runs seeds for a given time, or repeats one seed.

use std::io::Write;
use std::process::{Command, ExitCode, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use helix_sim::coverage::{CoverageLayer, CoverageMarks};
use helix_sim::plan::{SimulationPlan, Theme};
use helix_sim::run::{RunFailure, RunReport, run_plan};
use helix_sim::tally::Tally;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Simulate whole clusters and check everything that their clients observed
#[derive(Debug, Parser)]
struct Cli {
    /// Run this seed only
    #[arg(long)]
    seed: Option<u64>,

    /// Run seeds for this many seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,

    /// Run this many seeds, without a time limit
    #[arg(long)]
    seeds: Option<u64>,

    /// First seed of a series [default: random]
    #[arg(long)]
    from: Option<u64>,

    /// Seeds to run in parallel
    #[arg(long, default_value_t = 2)]
    jobs: u64,

    /// With --seed: run it twice and compare the traces
    #[arg(long)]
    twice: bool,

    /// With --seed: print the trace
    #[arg(long)]
    trace: bool,

    /// Print the log of the nodes, e.g. "helix_server=debug"
    #[arg(long)]
    log: Option<String>,

    /// Fail if the series never met one of the situations
    #[arg(long)]
    marks: bool,

    /// Continue after a failed seed
    #[arg(long)]
    keep_going: bool,

    /// Simulated seconds with faults [default: drawn from the seed]
    #[arg(long)]
    duration: Option<u64>,

    /// Use this theme of faults for every seed
    #[arg(long)]
    theme: Option<Theme>,

    /// Give placements nine nodes that grow to more than half of this many machines
    #[arg(long, value_parser = clap::value_parser!(u64).range(9..=32))]
    machines: Option<u64>,

    /// With --seed: print the counts that a series adds up
    #[arg(long, hide = true)]
    tally: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.seed {
        Some(seed) => run_one(seed, &cli),
        None => run_series(&cli),
    }
}

/// Runs a plan, counts coverage marks in the nodes' log, and prints that log if `log` is set.
fn run_logged(
    plan: SimulationPlan,
    keeps_trace: bool,
    log: Option<&str>,
) -> Result<RunReport, RunFailure> {
    let log_marks = CoverageMarks::default();
    let shown = log.map(|filter| {
        let layer = fmt::layer().with_writer(std::io::stderr).with_timer(SimulatedTime);
        layer.with_ansi(false).with_filter(EnvFilter::new(filter))
    });
    let listener =
        CoverageLayer(log_marks.clone()).with_filter(EnvFilter::new("helix_server=info"));
    let subscriber = tracing_subscriber::registry().with(listener).with(shown);
    let report = tracing::subscriber::with_default(subscriber, || run_plan(plan, keeps_trace))?;
    report.marks.merge(&log_marks);
    Ok(report)
}

struct SimulatedTime;

impl fmt::time::FormatTime for SimulatedTime {
    fn format_time(&self, out: &mut fmt::format::Writer<'_>) -> std::fmt::Result {
        let elapsed = turmoil::sim_elapsed().unwrap_or_default();
        write!(out, "{:>9.3}", elapsed.as_secs_f64())
    }
}

fn run_one(seed: u64, cli: &Cli) -> ExitCode {
    let mut plan = SimulationPlan::of(seed, cli.theme, cli.machines);
    if let Some(seconds) = cli.duration {
        plan.duration = Duration::from_secs(seconds);
    }
    if cli.tally {
        return run_for_tally(plan);
    }
    println!("{plan:#?}");
    if cli.twice {
        return compare_two_runs(seed, cli);
    }
    let first = run_logged(plan, cli.trace, cli.log.as_deref());
    let (trace, end) = match &first {
        Ok(report) => (&report.trace, describe(report)),
        Err(failure) => (&failure.trace, failure.what.clone()),
    };
    if cli.trace {
        let mut out = std::io::stdout().lock();
        for line in trace {
            // Ignored: the reader of the pipe has gone.
            let _ = writeln!(out, "{line}");
        }
    }
    println!("seed {seed}: {end}");
    if first.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the seed twice and compares the traces line by line.
fn compare_two_runs(seed: u64, cli: &Cli) -> ExitCode {
    let trace = || {
        let output = run_in_subprocess(seed, cli, "--trace")?;
        Ok::<_, String>(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (first, second) = match (trace(), trace()) {
        (Ok(first), Ok(second)) => (first, second),
        (Err(why), _) | (_, Err(why)) => {
            println!("{why}");
            return ExitCode::FAILURE;
        }
    };
    let (mut first, mut second) = (first.lines(), second.lines());
    for line in 0_u64.. {
        match (first.next(), second.next()) {
            (None, None) => {
                println!("seed {seed}: both runs are equal, {line} lines");
                break;
            }
            (first, second) if first == second => {}
            (first, second) => {
                println!("line {line} differs:\n  {first:?}\n  {second:?}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// Runs a seed in a subprocess.
fn run_in_subprocess(seed: u64, cli: &Cli, flag: &str) -> Result<Output, String> {
    let program =
        std::env::current_exe().map_err(|error| format!("cannot find the program: {error}"))?;
    let mut command = Command::new(program);
    command.args([flag, "--seed", &seed.to_string()]);
    if let Some(seconds) = cli.duration {
        command.args(["--duration", &seconds.to_string()]);
    }
    if let Some(machines) = cli.machines {
        command.args(["--machines", &machines.to_string()]);
    }
    if let Some(theme) = cli.theme.and_then(|theme| theme.to_possible_value()) {
        command.args(["--theme", theme.get_name()]);
    }
    command.output().map_err(|error| format!("cannot start the subprocess: {error}"))
}

fn describe(report: &RunReport) -> String {
    let RunReport { plan, verdict, simulated, crashes, hash, .. } = report;
    format!(
        "{} nodes, {} shards, {} partitions, {simulated:.0?}, {crashes} crashes; {verdict}; \
         {hash:016x}",
        plan.nodes, plan.shards, plan.partitions
    )
}

/// Runs one seed of a series in this process and prints its tally.
fn run_for_tally(plan: SimulationPlan) -> ExitCode {
    match run_logged(plan, false, None) {
        Ok(report) => {
            print!("{}", Tally::of(&report));
            println!("{}", describe(&report));
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!("{}", failure.what);
            ExitCode::FAILURE
        }
    }
}

/// Runs seeds, each in a subprocess.
///
/// Libraries keep state for the whole process, such as tokio's task numbers. It decides in which
/// order a crash ends tasks, so a run must not inherit it from the previous one.
#[allow(clippy::disallowed_methods)] // The time limit of a series is wall time.
fn run_series(cli: &Cli) -> ExitCode {
    let begin = Instant::now();
    let from = cli.from.unwrap_or_else(|| {
        use std::hash::BuildHasher;
        std::hash::RandomState::new().hash_one(0) >> 40
    });
    println!("seeds from {from} (--from {from} repeats them, --seed runs one)");
    let (next, has_failed) = (AtomicU64::new(from), AtomicBool::new(false));
    let total = Mutex::new(Tally::default());
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let is_over = match cli.seeds {
                Some(seeds) => seed >= from + seeds,
                None => begin.elapsed() >= Duration::from_secs(cli.seconds),
            };
            if is_over || has_failed.load(Ordering::Relaxed) && !cli.keep_going {
                return;
            }
            let begun = Instant::now();
            let ended = run_seed(seed, cli);
            let took = begun.elapsed();
            match ended {
                Ok((tally, text)) => {
                    println!("{seed} ok in {took:.1?}: {text}");
                    if let Ok(mut total) = total.lock() {
                        total.merge(&tally);
                    }
                }
                Err(what) => {
                    has_failed.store(true, Ordering::Relaxed);
                    println!("FAILED seed {seed} after {took:.1?}: {what}");
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..cli.jobs.max(1) {
            scope.spawn(work);
        }
    });
    let total = total.into_inner().unwrap_or_default();
    println!("{}", total.summary(begin.elapsed()));
    let missing = total.missing();
    if cli.marks && !missing.is_empty() {
        println!("FAILED: never met: {missing:?}");
        return ExitCode::FAILURE;
    }
    if has_failed.load(Ordering::Relaxed) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs a seed in a subprocess. Returns its tally and summary, or why it failed.
fn run_seed(seed: u64, cli: &Cli) -> Result<(Tally, String), String> {
    let output = run_in_subprocess(seed, cli, "--tally")?;
    let said = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        let (tally, text) = Tally::parse(&said);
        return Ok((tally, text));
    }
    let mut errors: Vec<_> =
        String::from_utf8_lossy(&output.stderr).lines().map(str::to_owned).collect();
    errors.truncate(4);
    Err(format!("{} {} {}", said.trim(), errors.join("; "), output.status))
}
