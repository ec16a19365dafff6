//! `flood`: more clients than a node wants. Ten thousand connections, a thousand readers that take
//! nothing, writers that do not wait, and clients that talk nonsense; and one that behaves.
//! Measured is what that one sees, and how much memory the node's process had at its most.
//!
//! All of it shares the processors and the disk of one machine, and so would be slower beside a
//! flood even if the node did nothing wrong. How much is measured too: another node runs on the
//! same machine, which nobody floods, and a second client does with it at the same time what the
//! first one does. Held against each other are these two.
//!
//! A node takes as many connections as its memory limit has room for. Where that is fewer than are
//! tried, the others must be closed at once; where it is more, none may be.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::parse_duration;
use crate::flood::{Crowd, Guest, Harm, Host, Latencies};
use crate::voice::Voice;

/// What a process may have beyond its limit: code, and what an allocator has not given back.
const OVER_LIMIT_PERCENT: u64 = 10;

/// Files that each of the two processes needs beside the connections.
const FILES_BESIDE: usize = 512;

/// Connections that may be between being accepted by the kernel and by the node.
const UNDER_WAY_MAX: u64 = 8;

const ALONE: &str = "alone";
const BEFORE: &str = "beside the writers";
const AGAIN: &str = "alone again";
const BESIDE_ALL: &str = "beside all";
const BESIDE_VANDALS: &str = "beside all and vandals";

/// Options of `flood`.
#[derive(Debug, Clone, Args)]
pub struct FloodArgs {
    /// Connections that are open and idle
    #[arg(long, default_value_t = 10_000)]
    pub connections: usize,

    /// Readers that subscribe or fetch, and then take nothing
    #[arg(long, default_value_t = 1_000)]
    pub readers: usize,

    /// Writers, each on a connection of its own, with four batches of 100 KiB under way
    #[arg(long, default_value_t = 32)]
    pub writers: usize,

    /// Connections of clients that speak HTTP/2 to do harm
    #[arg(long, default_value_t = 16)]
    pub vandals: usize,

    /// What they do, one after the other [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub harm: Vec<Harm>,

    /// How long each part is measured ("20s")
    #[arg(long, default_value = "20s", value_parser = parse_duration)]
    pub duration: Duration,

    /// The node's memory limit, in MiB: 3072 has room for all of the default's connections
    #[arg(long, default_value_t = 512)]
    pub memory_limit_mib: u64,

    /// How many times what it takes at a node beside it that is not flooded the slowest hundredth
    /// of the calls may take
    #[arg(long, default_value_t = 2.0)]
    pub p99_factor_max: f64,

    /// `--pace` of the node that is flooded, where not the default: with 0 the run should fail
    #[arg(long)]
    pub pace: Option<u32>,

    /// Only tell the latencies, and judge the memory and the errors: for a machine that is shared
    #[arg(long)]
    pub no_latency: bool,

    /// Give the figures as JSON on standard output
    #[arg(long)]
    pub json: bool,
}

/// One part of the run, as the client that behaves saw it.
#[derive(Debug, Serialize)]
struct Part {
    name: &'static str,
    #[serde(flatten)]
    seen: Seen,
    /// At the node that is not flooded.
    quiet: Seen,
    /// Batches of the flood that were acknowledged, and that were refused.
    flood_acked: u64,
    flood_refused: u64,
    rss_mib: u64,
    /// CPU of the node's process, in hundredths of one core.
    cpu_percent: u64,
}

/// What one client saw.
#[derive(Debug, Serialize)]
struct Seen {
    calls: usize,
    errors: u64,
    append_p50_us: u128,
    append_p99_us: u128,
    fetch_p50_us: u128,
    fetch_p99_us: u128,
}

#[derive(Debug, Serialize)]
struct Figures {
    memory_limit_mib: u64,
    peak_rss_mib: u64,
    /// As the clients see it.
    connections_open: usize,
    /// Of these, those that have nothing to say: no reader that the node may have ended.
    connections_idle: usize,
    connections_refused: usize,
    /// As the node sees it, with the one that behaves.
    connections_served: u64,
    /// How often clients met which limit.
    limits_met: BTreeMap<String, u64>,
    readers_ended: usize,
    parts: Vec<Part>,
}

pub(super) async fn run(args: FloodArgs, program: PathBuf) -> anyhow::Result<()> {
    let voice = Voice::new(args.json);
    open_files(args.connections + args.readers + args.writers + args.vandals + FILES_BESIDE)?;
    let folder = tempfile::tempdir().context("a folder for the node")?;
    let quiet_folder = tempfile::tempdir().context("a folder for the other node")?;
    let limit = args.memory_limit_mib;
    let mut host = Host::start(&program, folder.path(), limit, args.pace).await?;
    let quiet = Host::start(&program, quiet_folder.path(), limit, None).await?;
    let result = play(&args, voice, &mut host, &quiet).await;
    let stopped = [host.stop().await, quiet.stop().await];
    let figures = result?;
    stopped.into_iter().collect::<anyhow::Result<()>>()?;
    tell(&args, voice, &figures)?;
    judge(&args, &figures)
}

async fn play(
    args: &FloodArgs,
    voice: Voice,
    host: &mut Host,
    quiet: &Host,
) -> anyhow::Result<Figures> {
    host.fill().await.context("write what is to be read")?;
    let guest = Guest::connect(host.address()).await?;
    let elsewhere = Guest::connect(quiet.address()).await?;
    let mut parts = Vec::new();
    let mut measure = async |name, crowd: &Crowd, host: &mut Host| {
        let (begun, cpu) = (Instant::now(), host.cpu().await?);
        let before = crowd.writes();
        let (latencies, others) =
            tokio::join!(guest.measure(args.duration), elsewhere.measure(args.duration));
        let after = crowd.writes();
        let used = host.cpu().await?.saturating_sub(cpu);
        let part = Part {
            name,
            seen: Seen::new(&latencies),
            quiet: Seen::new(&others),
            flood_acked: after.0 - before.0,
            flood_refused: after.1 - before.1,
            rss_mib: host.rss_mib()?,
            cpu_percent: (100.0 * used.as_secs_f64() / begun.elapsed().as_secs_f64()) as u64,
        };
        say(voice, &part, parts.first());
        parts.push(part);
        host.is_alive()
    };

    let mut crowd = Crowd::new(host.address())?;
    measure(ALONE, &crowd, host).await?;
    crowd.write(args.writers).await?;
    if args.writers > 0 && !args.no_latency {
        host.come_round().await?;
    }
    measure(BEFORE, &crowd, host).await?;
    crowd.read_nothing(args.readers).await;
    crowd.idle(args.connections).await;
    let (connections_open, connections_refused) = (crowd.open(), crowd.refused());
    let connections_idle = crowd.idle_open();
    let connections_served = host.metric("helix_client_connections").await?;
    voice.say(format_args!(
        "{connections_open} connections, {connections_refused} refused; the node has \
         {connections_served}"
    ));
    measure(BESIDE_ALL, &crowd, host).await?;
    crowd.vandalise(args.vandals, kinds(args));
    measure(BESIDE_VANDALS, &crowd, host).await?;
    let readers_ended = crowd.readers_ended().await;
    let limits_met = host.limits_met().await?;
    crowd.leave().await;
    // What they held is free again, and nobody is worse off for having been there.
    sleep(Duration::from_secs(1)).await;
    measure(AGAIN, &Crowd::new(host.address())?, host).await?;
    Ok(Figures {
        memory_limit_mib: args.memory_limit_mib,
        peak_rss_mib: host.peak_rss_mib()?,
        connections_open,
        connections_idle,
        connections_refused,
        connections_served,
        limits_met,
        readers_ended,
        parts,
    })
}

fn kinds(args: &FloodArgs) -> &[Harm] {
    if args.harm.is_empty() { Harm::value_variants() } else { &args.harm }
}

/// This process and the node, which it starts, may have so many files open.
fn open_files(wanted: usize) -> anyhow::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = wanted as u64;
    if limit.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    ensure!(
        limit.maximum.is_none_or(|most| most >= wanted),
        "this takes {wanted} open files, and a process may have {} here: raise the hard limit \
         (ulimit -Hn), or ask for fewer --connections and --readers",
        limit.maximum.unwrap_or_default()
    );
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit })
        .context("raise the limit of open files")
}

fn say(voice: Voice, part: &Part, alone: Option<&Part>) {
    let alone = alone.map_or_else(String::new, |alone| {
        let of = |seen: fn(&Seen) -> u128| times(seen(&part.seen), seen(&alone.seen));
        let (append, fetch) = (of(|it| it.append_p99_us), of(|it| it.fetch_p99_us));
        format!(", {append:.1} and {fetch:.1} times {}", alone.name)
    });
    let Seen { append_p50_us, append_p99_us, fetch_p50_us, fetch_p99_us, .. } = part.seen;
    let (append, fetch) = part.factors();
    voice.say(format_args!(
        "{}: append p50 {append_p50_us} us p99 {append_p99_us} us, fetch p50 {fetch_p50_us} us p99 \
         {fetch_p99_us} us: p99 {append:.1} and {fetch:.1} times that at the node beside{alone}; \
         {} errors; flood {} acked, {} refused; RSS {} MiB, {} % CPU",
        part.name,
        part.seen.errors,
        part.flood_acked,
        part.flood_refused,
        part.rss_mib,
        part.cpu_percent
    ));
}

fn times(slow: u128, fast: u128) -> f64 {
    slow as f64 / fast.max(1) as f64
}

impl Part {
    /// How much slower the slowest hundredth of appends and fetches is than at the node beside.
    fn factors(&self) -> (f64, f64) {
        (
            times(self.seen.append_p99_us, self.quiet.append_p99_us),
            times(self.seen.fetch_p99_us, self.quiet.fetch_p99_us),
        )
    }
}

impl Seen {
    fn new(latencies: &Latencies) -> Self {
        let micros = |times: &[Duration], percent| at(times, percent).as_micros();
        Self {
            calls: latencies.appends.len() + latencies.fetches.len(),
            errors: latencies.errors,
            append_p50_us: micros(&latencies.appends, 50),
            append_p99_us: micros(&latencies.appends, 99),
            fetch_p50_us: micros(&latencies.fetches, 50),
            fetch_p99_us: micros(&latencies.fetches, 99),
        }
    }
}

/// Of sorted times.
fn at(times: &[Duration], percent: usize) -> Duration {
    let place = (times.len() * percent).div_ceil(100).saturating_sub(1);
    times.get(place).copied().unwrap_or_default()
}

fn tell(args: &FloodArgs, voice: Voice, figures: &Figures) -> anyhow::Result<()> {
    if args.json {
        println!("{}", serde_json::to_string(figures)?);
        return Ok(());
    }
    voice.say(format_args!(
        "peak RSS {} MiB, {} % of {} MiB; {} connections were open, {} refused; {} of {} readers \
         ended; limits met: {:?}",
        figures.peak_rss_mib,
        100 * figures.peak_rss_mib / figures.memory_limit_mib,
        figures.memory_limit_mib,
        figures.connections_open,
        figures.connections_refused,
        figures.readers_ended,
        args.readers,
        figures.limits_met
    ));
    Ok(())
}

fn judge(args: &FloodArgs, figures: &Figures) -> anyhow::Result<()> {
    let bound = figures.memory_limit_mib * (100 + OVER_LIMIT_PERCENT) / 100;
    ensure!(
        figures.peak_rss_mib <= bound,
        "the node had {} MiB, more than {bound} MiB",
        figures.peak_rss_mib
    );
    // Served or closed: none is left to wait for a place that it will not get.
    ensure!(
        figures.connections_idle as u64 <= figures.connections_served + UNDER_WAY_MAX,
        "clients have {} idle connections, and the node {}",
        figures.connections_idle,
        figures.connections_served
    );
    for part in &figures.parts {
        for seen in [&part.seen, &part.quiet] {
            ensure!(seen.errors == 0, "{} calls failed {}", seen.errors, part.name);
            ensure!(seen.calls > 0, "no call was answered {}", part.name);
        }
    }
    if args.no_latency {
        return Ok(());
    }
    let mut slower = Vec::new();
    for part in &figures.parts {
        let (append, fetch) = part.factors();
        for (call, factor) in [("append", append), ("fetch", fetch)] {
            if factor > args.p99_factor_max {
                slower.push(format!("{call} {}: {factor:.1} times", part.name));
            }
        }
    }
    ensure!(slower.is_empty(), "p99 against that at the node beside: {}", slower.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_calls_that_were_made() {
        let times: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!(at(&times, 50), Duration::from_millis(50));
        assert_eq!(at(&times, 99), Duration::from_millis(99));
        assert_eq!(at(&times[..1], 99), Duration::from_millis(1));
        assert_eq!(at(&[], 99), Duration::ZERO);
    }
}
