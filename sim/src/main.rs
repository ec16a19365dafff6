//! `helix-sim`: runs seeds until the time is over, or one seed again.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use helix_sim::marks::{Listener, Mark, Marks};
use helix_sim::plan::{Kind, Plan};
use helix_sim::run::{Failure, Report, run};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

/// Simulates whole clusters and checks everything that their clients were told
#[derive(Debug, Parser)]
struct Cli {
    /// Runs this seed only
    #[arg(long)]
    seed: Option<u64>,

    /// Runs seeds one after the other for this long
    #[arg(long, default_value_t = 60)]
    seconds: u64,

    /// Runs this many seeds, however long that takes
    #[arg(long)]
    seeds: Option<u64>,

    /// First seed of a series [default: drawn]
    #[arg(long)]
    from: Option<u64>,

    /// Seeds that are run at the same time
    #[arg(long, default_value_t = 2)]
    jobs: u64,

    /// With --seed: runs it twice, and compares the traces line by line
    #[arg(long)]
    twice: bool,

    /// With --seed: prints the trace
    #[arg(long)]
    trace: bool,

    /// Prints what the nodes log, for instance "helix_server=debug"
    #[arg(long)]
    log: Option<String>,

    /// Fails if something was never met in the whole series
    #[arg(long)]
    marks: bool,
}

/// What a series of runs adds up to.
#[derive(Debug, Default)]
struct Total {
    runs: u64,
    simulated: Duration,
    acked: u64,
    reads: u64,
    crashes: u64,
    faults: BTreeMap<Kind, u64>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.seed {
        Some(seed) => one(seed, &cli),
        None => series(&cli),
    }
}

/// Runs with the nodes' log in the marks, and on the screen if asked for.
fn listened(seed: u64, keeps_trace: bool, log: Option<&str>) -> Result<Report, Failure> {
    let heard = Marks::default();
    let shown = log.map(|filter| {
        let layer = fmt::layer().with_writer(std::io::stderr).with_timer(SimulatedTime);
        layer.with_ansi(false).with_filter(EnvFilter::new(filter))
    });
    let listener = Listener(heard.clone()).with_filter(EnvFilter::new("helix_server=info"));
    let subscriber = tracing_subscriber::registry().with(listener).with(shown);
    let report = tracing::subscriber::with_default(subscriber, || run(seed, keeps_trace))?;
    report.marks.take(&heard);
    Ok(report)
}

struct SimulatedTime;

impl fmt::time::FormatTime for SimulatedTime {
    fn format_time(&self, out: &mut fmt::format::Writer<'_>) -> std::fmt::Result {
        let elapsed = turmoil::sim_elapsed().unwrap_or_default();
        write!(out, "{:>9.3}", elapsed.as_secs_f64())
    }
}

fn one(seed: u64, cli: &Cli) -> ExitCode {
    println!("{:#?}", Plan::new(seed));
    let keeps_trace = cli.trace || cli.twice;
    let first = listened(seed, keeps_trace, cli.log.as_deref());
    let (trace, end) = match &first {
        Ok(report) => (&report.trace, describe(report)),
        Err(failure) => (&failure.trace, failure.what.clone()),
    };
    if cli.trace {
        let mut out = std::io::stdout().lock();
        for line in trace {
            // Ignored: whoever reads has seen enough.
            let _ = writeln!(out, "{line}");
        }
    }
    println!("seed {seed}: {end}");
    if cli.twice {
        eprintln!("once more");
        let second = listened(seed, true, cli.log.as_deref());
        let again = match &second {
            Ok(report) => &report.trace,
            Err(failure) => &failure.trace,
        };
        let differs = (0..trace.len().max(again.len())).find(|at| trace.get(*at) != again.get(*at));
        if let Some(at) = differs {
            println!("line {at} differs:\n  {:?}\n  {:?}", trace.get(at), again.get(at));
            return ExitCode::FAILURE;
        }
        println!("the same twice, {} lines", trace.len());
    }
    if first.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn describe(report: &Report) -> String {
    let Report { plan, verdict, simulated, crashes, hash, .. } = report;
    format!(
        "{} nodes, {} shards, {} partitions, {simulated:.0?}, {crashes} crashes; {verdict}; \
         {hash:016x}",
        plan.nodes, plan.shards, plan.partitions
    )
}

#[allow(clippy::disallowed_methods)] // The time that a series may take is real.
fn series(cli: &Cli) -> ExitCode {
    let begin = Instant::now();
    let from = cli.from.unwrap_or_else(|| {
        use std::hash::BuildHasher;
        std::hash::RandomState::new().hash_one(0) >> 40
    });
    println!("seeds from {from} (--from {from} repeats them, --seed runs one)");
    let (next, has_failed) = (AtomicU64::new(from), AtomicBool::new(false));
    let total = Mutex::new(Total::default());
    let marks = Marks::default();
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let is_over = match cli.seeds {
                Some(seeds) => seed >= from + seeds,
                None => begin.elapsed() >= Duration::from_secs(cli.seconds),
            };
            if is_over || has_failed.load(Ordering::Relaxed) {
                return;
            }
            let begun = Instant::now();
            match listened(seed, false, None) {
                Ok(report) => {
                    println!("{seed} ok in {:.1?}: {}", begun.elapsed(), describe(&report));
                    marks.take(&report.marks);
                    if let Ok(mut total) = total.lock() {
                        total.take(&report);
                    }
                }
                Err(failure) => {
                    has_failed.store(true, Ordering::Relaxed);
                    println!("FAILED seed {seed} after {:.1?}: {}", begun.elapsed(), failure.what);
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..cli.jobs.max(1) {
            scope.spawn(work);
        }
    });
    if let Ok(total) = total.lock() {
        total.print(begin.elapsed(), &marks);
    }
    let missing = marks.missing();
    if cli.marks && !missing.is_empty() {
        println!("FAILED: never met: {missing:?}");
        return ExitCode::FAILURE;
    }
    if has_failed.load(Ordering::Relaxed) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

impl Total {
    fn take(&mut self, report: &Report) {
        self.runs += 1;
        self.simulated += report.simulated;
        self.acked += report.verdict.acked;
        self.reads += report.verdict.reads;
        self.crashes += report.crashes;
        for (kind, count) in &report.faults {
            *self.faults.entry(*kind).or_default() += count;
        }
    }

    fn print(&self, wall: Duration, marks: &Marks) {
        let Self { runs, simulated, acked, reads, crashes, faults } = self;
        let speed = simulated.as_secs_f64() / wall.as_secs_f64();
        println!(
            "{runs} runs, {:.2} simulated hours in {:.0} s ({speed:.1} times as fast as time); \
             {acked} batches acked, {reads} read, {crashes} crashes",
            simulated.as_secs_f64() / 3600.0,
            wall.as_secs_f64()
        );
        println!("faults: {faults:?}");
        let met = Mark::ALL.into_iter().map(|mark| format!("{mark:?} {}", marks.get(mark)));
        println!("met: {}", met.collect::<Vec<_>>().join(", "));
    }
}
