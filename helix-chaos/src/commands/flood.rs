//! `flood`: more clients than a node wants. Two thousand connections, readers that take nothing,
//! writers that do not wait, and clients that talk nonsense; and one that behaves. Measured is what
//! that one sees, and how much memory the node's process had at its most.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use serde::Serialize;
use tokio::time::sleep;

use super::parse_duration;
use crate::flood::{Crowd, Guest, Host, Latencies};
use crate::voice::Voice;

/// What a process may have beyond its limit: code, and what an allocator has not given back.
const OVER_LIMIT_PERCENT: u64 = 10;

/// How much slower the slowest hundredth of the calls may get by readers and connections.
const SLOWER_MAX: f64 = 2.0;

/// Options of `flood`.
#[derive(Debug, Clone, Args)]
pub struct FloodArgs {
    /// Connections that are open and idle
    #[arg(long, default_value_t = 1_750)]
    pub connections: usize,

    /// Readers that subscribe or fetch, and then take nothing
    #[arg(long, default_value_t = 200)]
    pub readers: usize,

    /// Writers, each on a connection of its own, with four batches of 100 KiB under way
    #[arg(long, default_value_t = 32)]
    pub writers: usize,

    /// Connections of clients that speak HTTP/2 to do harm
    #[arg(long, default_value_t = 16)]
    pub vandals: usize,

    /// How long each part is measured ("20s")
    #[arg(long, default_value = "20s", value_parser = parse_duration)]
    pub duration: Duration,

    /// The node's memory limit, in MiB
    #[arg(long, default_value_t = 512)]
    pub memory_limit_mib: u64,

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
    calls: usize,
    errors: u64,
    append_p50_us: u128,
    append_p99_us: u128,
    fetch_p50_us: u128,
    fetch_p99_us: u128,
    /// Batches of the flood that were acknowledged, and that were refused.
    flood_acked: u64,
    flood_refused: u64,
    rss_mib: u64,
}

#[derive(Debug, Serialize)]
struct Figures {
    memory_limit_mib: u64,
    peak_rss_mib: u64,
    connections_open: usize,
    connections_refused: usize,
    readers_ended: usize,
    parts: Vec<Part>,
}

pub(super) async fn run(args: FloodArgs, program: PathBuf) -> anyhow::Result<()> {
    let voice = Voice::new(args.json);
    let folder = tempfile::tempdir().context("a folder for the node")?;
    let mut host = Host::start(&program, folder.path(), args.memory_limit_mib).await?;
    let result = play(&args, voice, &mut host).await;
    let stopped = host.stop().await;
    let figures = result?;
    stopped?;
    tell(&args, voice, &figures)?;
    judge(&args, &figures)
}

async fn play(args: &FloodArgs, voice: Voice, host: &mut Host) -> anyhow::Result<Figures> {
    host.fill().await.context("write what is to be read")?;
    let guest = Guest::connect(host.address()).await?;
    let mut parts = Vec::new();
    let mut measure = async |name, crowd: &Crowd, host: &mut Host| {
        let before = crowd.writes();
        let latencies = guest.measure(args.duration).await;
        let after = crowd.writes();
        let part = part(name, &latencies, (after.0 - before.0, after.1 - before.1), host)?;
        voice.say(format_args!(
            "{name}: append p50 {} us p99 {} us, fetch p50 {} us p99 {} us, {} errors; flood {} \
             acked, {} refused; RSS {} MiB",
            part.append_p50_us,
            part.append_p99_us,
            part.fetch_p50_us,
            part.fetch_p99_us,
            part.errors,
            part.flood_acked,
            part.flood_refused,
            part.rss_mib
        ));
        parts.push(part);
        host.is_alive()
    };

    let mut crowd = Crowd::new(host.address());
    measure("alone", &crowd, host).await?;
    crowd.write(args.writers).await?;
    measure("beside the writers", &crowd, host).await?;
    crowd.read_nothing(args.readers).await;
    crowd.idle(args.connections).await;
    voice.say(format_args!("{} connections, {} refused", crowd.open(), crowd.refused()));
    measure("beside all", &crowd, host).await?;
    crowd.vandalise(args.vandals);
    measure("beside all and vandals", &crowd, host).await?;
    let (connections_open, connections_refused) = (crowd.open(), crowd.refused());
    let readers_ended = crowd.readers_ended().await;
    crowd.leave().await;
    // What they held is free again, and nobody is worse off for having been there.
    sleep(Duration::from_secs(1)).await;
    measure("alone again", &Crowd::new(host.address()), host).await?;
    Ok(Figures {
        memory_limit_mib: args.memory_limit_mib,
        peak_rss_mib: host.peak_rss_mib()?,
        connections_open,
        connections_refused,
        readers_ended,
        parts,
    })
}

fn part(
    name: &'static str,
    latencies: &Latencies,
    (flood_acked, flood_refused): (u64, u64),
    host: &Host,
) -> anyhow::Result<Part> {
    let micros = |times: &[Duration], percent| at(times, percent).as_micros();
    Ok(Part {
        name,
        calls: latencies.appends.len() + latencies.fetches.len(),
        errors: latencies.errors,
        append_p50_us: micros(&latencies.appends, 50),
        append_p99_us: micros(&latencies.appends, 99),
        fetch_p50_us: micros(&latencies.fetches, 50),
        fetch_p99_us: micros(&latencies.fetches, 99),
        flood_acked,
        flood_refused,
        rss_mib: host.rss_mib()?,
    })
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
        "peak RSS {} MiB of {} MiB; {} connections were open, {} refused; {} of {} readers ended",
        figures.peak_rss_mib,
        figures.memory_limit_mib,
        figures.connections_open,
        figures.connections_refused,
        figures.readers_ended,
        args.readers
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
    for part in &figures.parts {
        ensure!(part.errors == 0, "{} calls failed {}", part.errors, part.name);
        ensure!(part.calls > 0, "no call was answered {}", part.name);
    }
    if args.no_latency {
        return Ok(());
    }
    let p99 = |name: &str| {
        let part = figures.parts.iter().find(|part| part.name == name);
        part.map(|part| part.append_p99_us).context("a part was not measured")
    };
    let (before, beside) = (p99("beside the writers")?, p99("beside all")?);
    ensure!(
        beside as f64 <= before as f64 * SLOWER_MAX,
        "p99 of an append went from {before} us to {beside} us by readers and connections"
    );
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
