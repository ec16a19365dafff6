//! `helix-sim`: runs seeds until the time is over, or one seed again.

use std::io::Write;
use std::process::{Command, ExitCode, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use helix_sim::marks::{Listener, Marks};
use helix_sim::plan::{Plan, Theme};
use helix_sim::run::{Failure, Report, run_plan};
use helix_sim::tally::Tally;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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

    /// Goes on after a seed that failed
    #[arg(long)]
    keep_going: bool,

    /// Breaks each cluster for so many simulated seconds instead of what its seed draws
    #[arg(long)]
    duration: Option<u64>,

    /// Has every seed break mostly this, whatever it draws
    #[arg(long)]
    theme: Option<Theme>,

    /// With --seed: prints what a series adds up
    #[arg(long, hide = true)]
    tally: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.seed {
        Some(seed) => one(seed, &cli),
        None => series(&cli),
    }
}

/// Runs with the nodes' log in the marks, and on the screen if asked for.
fn listened(plan: Plan, keeps_trace: bool, log: Option<&str>) -> Result<Report, Failure> {
    let heard = Marks::default();
    let shown = log.map(|filter| {
        let layer = fmt::layer().with_writer(std::io::stderr).with_timer(SimulatedTime);
        layer.with_ansi(false).with_filter(EnvFilter::new(filter))
    });
    let listener = Listener(heard.clone()).with_filter(EnvFilter::new("helix_server=info"));
    let subscriber = tracing_subscriber::registry().with(listener).with(shown);
    let report = tracing::subscriber::with_default(subscriber, || run_plan(plan, keeps_trace))?;
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
    let mut plan = Plan::of(seed, cli.theme);
    if let Some(seconds) = cli.duration {
        plan.duration = Duration::from_secs(seconds);
    }
    if cli.tally {
        return tallied(plan);
    }
    println!("{plan:#?}");
    if cli.twice {
        return twice(seed, cli);
    }
    let first = listened(plan, cli.trace, cli.log.as_deref());
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
    if first.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compares the traces of two runs, line by line.
fn twice(seed: u64, cli: &Cli) -> ExitCode {
    let trace = || {
        let output = alone(seed, cli, "--trace")?;
        Ok::<_, String>(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (one, other) = match (trace(), trace()) {
        (Ok(one), Ok(other)) => (one, other),
        (Err(why), _) | (_, Err(why)) => {
            println!("{why}");
            return ExitCode::FAILURE;
        }
    };
    let (mut one, mut other) = (one.lines(), other.lines());
    for line in 0_u64.. {
        match (one.next(), other.next()) {
            (None, None) => {
                println!("seed {seed}: the same twice, {line} lines");
                break;
            }
            (one, other) if one == other => {}
            (one, other) => {
                println!("line {line} differs:\n  {one:?}\n  {other:?}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// Runs a seed in a process of its own.
fn alone(seed: u64, cli: &Cli, flag: &str) -> Result<Output, String> {
    let program = std::env::current_exe().map_err(|error| format!("no program: {error}"))?;
    let mut command = Command::new(program);
    command.args([flag, "--seed", &seed.to_string()]);
    if let Some(seconds) = cli.duration {
        command.args(["--duration", &seconds.to_string()]);
    }
    if let Some(theme) = cli.theme.and_then(|theme| theme.to_possible_value()) {
        command.args(["--theme", theme.get_name()]);
    }
    command.output().map_err(|error| format!("it does not start: {error}"))
}

fn describe(report: &Report) -> String {
    let Report { plan, verdict, simulated, crashes, hash, .. } = report;
    format!(
        "{} nodes, {} shards, {} partitions, {simulated:.0?}, {crashes} crashes; {verdict}; \
         {hash:016x}",
        plan.nodes, plan.shards, plan.partitions
    )
}

/// One run of a series, in a process of its own.
fn tallied(plan: Plan) -> ExitCode {
    match listened(plan, false, None) {
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

/// Runs seeds, each in a process of its own: some of what libraries keep is one for the whole
/// process, like the numbers of tokio's tasks, and decides in which order a crash ends them.
#[allow(clippy::disallowed_methods)] // The time that a series may take is real.
fn series(cli: &Cli) -> ExitCode {
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
            let ended = apart(seed, cli);
            let took = begun.elapsed();
            match ended {
                Ok((tally, text)) => {
                    println!("{seed} ok in {took:.1?}: {text}");
                    if let Ok(mut total) = total.lock() {
                        total.take(&tally);
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

/// Runs a seed in a process of its own: what it adds up to and says, or why it failed.
fn apart(seed: u64, cli: &Cli) -> Result<(Tally, String), String> {
    let output = alone(seed, cli, "--tally")?;
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
