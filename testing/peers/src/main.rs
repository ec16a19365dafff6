//! Writes batches to another log, in the load shape of `helix-bench write`, for a comparison.
//!
//! Each client is a connection and a thread with one batch in flight: it sends all records of a
//! batch at once and waits for every reply. With `--rate` the load is open: latency counts from the
//! time at which a batch was due.

mod jetstream;
mod redis;

use std::path::PathBuf;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use hdrhistogram::Histogram;
use serde_json::json;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Peer {
    /// Redis streams: XADD, pipelined
    Redis,
    /// NATS JetStream: publishes with acks
    Jetstream,
}

/// Measure appends to another log
#[derive(Parser)]
struct Options {
    /// Program to measure
    peer: Peer,
    /// Address, host:port
    #[arg(long)]
    addr: String,
    /// Connections, each with one batch in flight
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    clients: u32,
    /// Records in a batch
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    batch_size: u32,
    /// Bytes of a record
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    size: u32,
    /// Seconds to measure
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Seconds to write before
    #[arg(long, default_value_t = 2.0)]
    warmup: f64,
    /// Records per second of all clients together; as many as possible without it
    #[arg(long)]
    rate: Option<f64>,
    /// Name of the setup, for tables
    #[arg(long, default_value = "")]
    label: String,
    /// File for the result
    #[arg(long)]
    json: PathBuf,
}

/// A connection that writes batches of equal records.
trait Connection: Send {
    /// Writes one batch and waits until each of its records is acked.
    ///
    /// # Errors
    /// The connection failed, or a record was refused.
    fn append(&mut self) -> Result<()>;
}

/// Times of the batches that a client sent.
struct Measured {
    latency_us: Histogram<u64>,
    batches: u64,
    /// Batches acked in each second of the run.
    seconds: Vec<u64>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(
        options.seconds > 0.0
            && options.seconds <= 3600.0
            && (0.0..=3600.0).contains(&options.warmup),
        "--seconds and --warmup must be at most 3600 s"
    );
    ensure!(options.rate.is_none_or(|rate| rate > 0.0), "--rate must be positive");
    let mut connections = Vec::new();
    for number in 0..options.clients {
        connections
            .push(open(&options, number).with_context(|| format!("cannot use {}", options.addr))?);
    }
    let barrier = Barrier::new(connections.len());
    let measured = thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(connections)
            .map(|(number, connection)| {
                let (options, barrier) = (&options, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    load(options, number, connection)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    let mut all = Measured::new()?;
    for one in measured {
        let Ok(one) = one else { bail!("a client panicked") };
        all.add(&one?)?;
    }
    report(&options, &all)
}

/// Opens the connection of a client; the first one creates the log, empty.
fn open(options: &Options, number: u32) -> Result<Box<dyn Connection>> {
    Ok(match options.peer {
        Peer::Redis => Box::new(redis::open(options, number == 0)?),
        Peer::Jetstream => Box::new(jetstream::open(options, number)?),
    })
}

fn load(options: &Options, number: u32, mut connection: Box<dyn Connection>) -> Result<Measured> {
    let mut measured = Measured::new()?;
    // The clients of an open loop are due one after another, evenly.
    let interval = options.rate.map(|rate| f64::from(options.batch_size * options.clients) / rate);
    let began = Instant::now();
    let warmup = Duration::from_secs_f64(options.warmup);
    let end = warmup + Duration::from_secs_f64(options.seconds);
    for sent in 0_u32.. {
        let due = match interval {
            None => began.elapsed(),
            Some(interval) => {
                let offset = f64::from(number) / f64::from(options.clients);
                let due = Duration::from_secs_f64(interval * (f64::from(sent) + offset));
                thread::sleep(due.saturating_sub(began.elapsed()));
                due
            }
        };
        if due >= end || began.elapsed() >= end {
            break;
        }
        connection.append()?;
        let now = began.elapsed();
        if due >= warmup && now <= end {
            measured.record(now - due, now - warmup)?;
        }
    }
    Ok(measured)
}

impl Measured {
    fn new() -> Result<Self> {
        Ok(Self { latency_us: Histogram::new(3)?, batches: 0, seconds: Vec::new() })
    }

    fn record(&mut self, latency: Duration, at: Duration) -> Result<()> {
        self.latency_us.record(latency.as_micros() as u64)?;
        self.batches += 1;
        let second = at.as_secs() as usize;
        if self.seconds.len() <= second {
            self.seconds.resize(second + 1, 0);
        }
        self.seconds[second] += 1;
        Ok(())
    }

    fn add(&mut self, other: &Self) -> Result<()> {
        self.latency_us.add(&other.latency_us)?;
        self.batches += other.batches;
        self.seconds.resize(self.seconds.len().max(other.seconds.len()), 0);
        for (all, one) in self.seconds.iter_mut().zip(&other.seconds) {
            *all += one;
        }
        Ok(())
    }
}

fn report(options: &Options, measured: &Measured) -> Result<()> {
    let latency = &measured.latency_us;
    let per_second = measured.batches as f64 / options.seconds * f64::from(options.batch_size);
    let at = |quantile: f64| latency.value_at_quantile(quantile);
    let result = json!({
        "label": options.label,
        "clients": options.clients,
        "batch_size": options.batch_size,
        "size": options.size,
        "target_rate": options.rate,
        "records": measured.batches * u64::from(options.batch_size),
        "records_per_sec": per_second,
        "latency_us": {
            "p50": at(0.5), "p90": at(0.9), "p99": at(0.99),
            "p99_9": at(0.999), "p99_99": at(0.9999), "max": latency.max(),
        },
    });
    std::fs::write(&options.json, format!("{result:#}\n"))
        .with_context(|| format!("cannot write {}", options.json.display()))?;
    println!(
        "{:<32} {per_second:>12.0} records/s  p50 {:>8.2} ms  p99 {:>8.2} ms",
        options.label,
        at(0.5) as f64 / 1000.0,
        at(0.99) as f64 / 1000.0,
    );
    Ok(())
}
