//! A load, complete and checked: what the flags of a command come down to.
//! Says what is to be done; `budget` deals it out and the commands do it.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use helix_proto::log::v1::Durability;
use serde::{Serialize, Serializer};

use crate::args::{Acks, LoadArgs, Mode, Payload};
use crate::report::cores;
use crate::stamp::STAMP_BYTES;

/// Everything that describes a run, and nothing that it finds out.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Load {
    pub(crate) mode: Mode,
    pub(crate) addr: Vec<String>,
    pub(crate) topic: String,
    /// None: all partitions of the topic.
    pub(crate) partition: Option<u32>,
    /// Negative: so many records before the end.
    pub(crate) offset: i64,
    pub(crate) size: usize,
    pub(crate) batch_size: u32,
    pub(crate) clients: usize,
    pub(crate) connections: usize,
    pub(crate) in_flight: usize,
    pub(crate) stream: bool,
    /// Records per second; None: closed loop.
    pub(crate) rate: Option<f64>,
    pub(crate) acks: Acks,
    pub(crate) payload: Payload,
    pub(crate) idempotent: bool,
    pub(crate) verify: bool,
    pub(crate) subscribers: usize,
    pub(crate) create_topic: Option<u32>,
    pub(crate) replication_factor: Option<u32>,
    pub(crate) seed: u64,
    /// Of this process's runtime.
    pub(crate) threads: usize,
    pub(crate) warmup: Phase,
    pub(crate) run: Phase,
}

/// Bounds of one part of a run: whichever is reached first ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Phase {
    pub(crate) records: Option<u64>,
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub(crate) duration: Option<Duration>,
}

fn seconds<S: Serializer>(duration: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
    duration.map(|duration| duration.as_secs_f64()).serialize(out)
}

/// Warm-up of a run that is bounded by time.
const WARMUP_DEFAULT: Duration = Duration::from_secs(1);
/// Share of the records that is written or read as a warm-up where they bound the run.
const WARMUP_SHARE: u64 = 10;
/// Longest warm-up of a run that is bounded by records, however many.
const WARMUP_MAX: Duration = Duration::from_secs(10);
/// Batches of a warm-up at least, per request in flight: the first ones look up the way.
const WARMUP_ROUNDS: u64 = 5;

/// Where nobody says.
const ADDR_DEFAULT: &str = "127.0.0.1:9092";

/// Most clients, connections and requests in flight that a flag may ask for.
pub(crate) const COUNT_MAX: usize = 65_536;
/// Most requests in flight over all clients.
const LANES_MAX: usize = 1 << 20;
/// Most records per second: above what anything here can time.
const RATE_MAX: f64 = 1e9;

/// # Errors
/// Names the flag whose value is out of range.
pub(crate) fn check_count(flag: &str, count: usize) -> Result<()> {
    ensure!((1..=COUNT_MAX).contains(&count), "{flag} must be from 1 to {COUNT_MAX}");
    Ok(())
}

impl Load {
    /// # Errors
    /// Which flag is missing, out of range, or of no use to the command.
    pub(crate) fn new(mode: Mode, args: &LoadArgs) -> Result<Self> {
        refuse_useless(mode, args)?;
        let partition = match args.partition {
            -1 => None,
            number => match u32::try_from(number) {
                Ok(number) => Some(number),
                Err(_) => bail!("--partition is -1 (all) or a partition's number"),
            },
        };
        let batch_size_default = match mode {
            Mode::Latency | Mode::E2e => 1,
            Mode::Write | Mode::Stream | Mode::Read => 100,
        };
        let subscribers = if mode == Mode::E2e { args.subscribers.unwrap_or(1) } else { 0 };
        let load = Self {
            mode,
            addr: match args.addr.as_slice() {
                [] => vec![ADDR_DEFAULT.to_owned()],
                addr => addr.to_vec(),
            },
            topic: args.topic.clone(),
            partition,
            offset: args.offset.unwrap_or(0),
            size: args.size.unwrap_or(1024),
            batch_size: args.batch_size.unwrap_or(batch_size_default),
            clients: args.clients,
            connections: args.connections.unwrap_or(args.clients.saturating_add(subscribers)),
            in_flight: args.in_flight,
            stream: args.stream || mode == Mode::Stream,
            rate: args.rate,
            acks: args.acks.unwrap_or(Acks::All),
            payload: args.payload.unwrap_or(Payload::Random),
            idempotent: !args.no_idempotence,
            verify: args.verify,
            subscribers,
            create_topic: args.create_topic,
            replication_factor: args.replication_factor,
            seed: args.seed,
            threads: args.threads.unwrap_or_else(|| threads(mode, args)),
            warmup: warmup(mode, args, batch_size_default),
            run: Phase { records: records(mode, args), duration: args.duration },
        };
        load.check()?;
        Ok(load)
    }

    fn check(&self) -> Result<()> {
        check_count("--clients", self.clients)?;
        check_count("--in-flight", self.in_flight)?;
        ensure!(
            self.lanes() <= LANES_MAX,
            "--clients times --in-flight must be at most {LANES_MAX}"
        );
        if self.mode == Mode::E2e {
            check_count("--subscribers", self.subscribers)?;
        }
        ensure!(
            (1..=2 * COUNT_MAX).contains(&self.connections),
            "--connections must be from 1 to {}",
            2 * COUNT_MAX
        );
        check_count("--threads", self.threads)?;
        ensure!(self.batch_size > 0, "--batch-size must be at least 1");
        ensure!(
            self.run.records != Some(0),
            "there is nothing to do: --records and --ops must be above 0"
        );
        ensure!(
            self.run.duration != Some(Duration::ZERO),
            "there is nothing to do: --duration must be above 0"
        );
        ensure!(
            self.rate.is_none_or(|rate| rate > 0.0 && rate <= RATE_MAX),
            "--rate must be above 0 and at most {RATE_MAX}"
        );
        let is_stamped = self.verify && self.is_write() || self.mode == Mode::E2e;
        ensure!(
            !is_stamped || self.size >= STAMP_BYTES,
            "records carry a stamp of {STAMP_BYTES} bytes here: --size must be at least that"
        );
        ensure!(
            self.mode != Mode::Latency || self.in_flight == 1,
            "latency has one request in flight per client: use --clients"
        );
        ensure!(
            self.mode != Mode::Latency || matches!(self.acks, Acks::All | Acks::QuorumWritten),
            "latency fetches what it wrote at the offset in the ack, which only --acks all and \
             quorum-written have"
        );
        Ok(())
    }

    pub(crate) fn is_write(&self) -> bool {
        matches!(self.mode, Mode::Write | Mode::Stream)
    }

    /// Requests in flight over all clients.
    pub(crate) fn lanes(&self) -> usize {
        self.clients.saturating_mul(self.in_flight)
    }

    /// The same load with a warm-up that is over when the records that are there have been read.
    pub(crate) fn with_records_there(&self, there: u64) -> Self {
        let mut load = self.clone();
        load.warmup.records = load.warmup.records.map(|records| records.min(there));
        load
    }

    pub(crate) fn durability(&self) -> Durability {
        match self.acks {
            Acks::All => Durability::QuorumSynced,
            Acks::QuorumWritten => Durability::QuorumWritten,
            Acks::One => Durability::LeaderWritten,
            Acks::None => Durability::None,
        }
    }
}

/// One request at a time keeps one thread busy. A second one would not help, but the executor wakes
/// it to take a task over, so that requests go from one core to the other, or do not: with both,
/// medians of the same run against the same server are a fifth apart.
fn threads(mode: Mode, args: &LoadArgs) -> usize {
    let is_one_at_a_time = args.clients == 1
        && args.in_flight == 1
        && !args.stream
        && matches!(mode, Mode::Write | Mode::Read | Mode::Latency);
    if is_one_at_a_time { 1 } else { cores() }
}

fn records(mode: Mode, args: &LoadArgs) -> Option<u64> {
    let default = match mode {
        Mode::Latency => 1_000,
        Mode::E2e => 10_000,
        Mode::Write | Mode::Stream | Mode::Read => 100_000,
    };
    let asked = args.records.or(args.ops);
    asked.or_else(|| args.duration.is_none().then_some(default))
}

fn warmup(mode: Mode, args: &LoadArgs, batch_size_default: u32) -> Phase {
    match (args.warmup, args.duration, records(mode, args)) {
        (Some(duration), _, _) => Phase { records: None, duration: Some(duration) },
        (None, None, Some(records)) => {
            let batch = u64::from(args.batch_size.unwrap_or(batch_size_default));
            let lanes = (args.clients as u64).saturating_mul(args.in_flight as u64);
            let least = batch.saturating_mul(lanes).saturating_mul(WARMUP_ROUNDS);
            let records = (records / WARMUP_SHARE).max(least);
            Phase { records: Some(records), duration: Some(WARMUP_MAX) }
        }
        (None, _, _) => Phase { records: None, duration: Some(WARMUP_DEFAULT) },
    }
}

/// A flag that is silently without effect makes a figure that is not what it says.
fn refuse_useless(mode: Mode, args: &LoadArgs) -> Result<()> {
    let is_write = matches!(mode, Mode::Write | Mode::Stream);
    let writes = mode != Mode::Read;
    let useless = [
        ("--offset", args.offset.is_some() && writes),
        ("--ops", args.ops.is_some() && mode != Mode::Latency),
        ("--records", args.records.is_some() && mode == Mode::Latency),
        ("--batch-size", args.batch_size.is_some_and(|size| size != 1) && mode == Mode::Latency),
        ("--stream", args.stream && mode == Mode::Latency),
        ("--rate", args.rate.is_some() && !writes),
        ("--acks", args.acks.is_some() && !writes),
        ("--payload", args.payload.is_some() && (!writes || mode == Mode::E2e)),
        ("--payload with --verify", args.payload.is_some() && args.verify),
        ("--no-idempotence", args.no_idempotence && !writes),
        ("--verify", args.verify && !(is_write || mode == Mode::Read)),
        ("--subscribers", args.subscribers.is_some() && mode != Mode::E2e),
        ("--in-flight with --stream", args.stream && args.in_flight > 1 && mode == Mode::Read),
    ];
    for (flag, is_useless) in useless {
        ensure!(!is_useless, "{flag} has no meaning for {}", mode.name());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> LoadArgs {
        LoadArgs { clients: 1, in_flight: 1, ..LoadArgs::default() }
    }

    #[test]
    fn a_bare_write_is_bounded_by_records() {
        let load = Load::new(Mode::Write, &args()).unwrap();
        assert_eq!(load.run, Phase { records: Some(100_000), duration: None });
        assert_eq!(load.warmup, Phase { records: Some(10_000), duration: Some(WARMUP_MAX) });
        assert_eq!((load.batch_size, load.size, load.partition), (100, 1024, Some(0)));
    }

    #[test]
    fn a_duration_takes_the_place_of_the_default_records() {
        let duration = Some(Duration::from_secs(3));
        let load = Load::new(Mode::Read, &LoadArgs { duration, ..args() }).unwrap();
        assert_eq!(load.run, Phase { records: None, duration });
        assert_eq!(load.warmup, Phase { records: None, duration: Some(WARMUP_DEFAULT) });
        let both = LoadArgs { duration, records: Some(7), ..args() };
        let load = Load::new(Mode::Write, &both).unwrap();
        assert_eq!(load.run, Phase { records: Some(7), duration });
    }

    #[test]
    fn one_request_at_a_time_has_one_thread() {
        for mode in [Mode::Write, Mode::Read, Mode::Latency] {
            assert_eq!(Load::new(mode, &args()).unwrap().threads, 1);
        }
        let many = [
            (Mode::Write, LoadArgs { clients: 2, ..args() }),
            (Mode::Write, LoadArgs { in_flight: 2, ..args() }),
            (Mode::Read, LoadArgs { stream: true, ..args() }),
            (Mode::E2e, args()),
        ];
        for (mode, args) in many {
            assert_eq!(Load::new(mode, &args).unwrap().threads, cores());
            let asked = LoadArgs { threads: Some(3), ..args };
            assert_eq!(Load::new(mode, &asked).unwrap().threads, 3);
        }
        assert!(Load::new(Mode::Write, &LoadArgs { threads: Some(0), ..args() }).is_err());
    }

    #[test]
    fn flags_without_effect_are_refused() {
        let offset = LoadArgs { offset: Some(1), ..args() };
        assert!(Load::new(Mode::Write, &offset).is_err());
        assert!(Load::new(Mode::Read, &offset).is_ok());
        let rate = LoadArgs { rate: Some(10.0), ..args() };
        assert!(Load::new(Mode::Read, &rate).is_err());
        let tiny = LoadArgs { verify: true, size: Some(8), ..args() };
        assert!(Load::new(Mode::Write, &tiny).is_err());
        assert!(Load::new(Mode::Write, &LoadArgs { partition: -2, ..args() }).is_err());
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        let odd = [
            LoadArgs { rate: Some(0.0), ..args() },
            LoadArgs { rate: Some(1e300), ..args() },
            LoadArgs { rate: Some(f64::NAN), ..args() },
            LoadArgs { clients: 0, ..args() },
            LoadArgs { clients: COUNT_MAX + 1, ..args() },
            LoadArgs { in_flight: 0, ..args() },
            LoadArgs { in_flight: usize::MAX, ..args() },
            LoadArgs { clients: COUNT_MAX, in_flight: COUNT_MAX, ..args() },
            LoadArgs { connections: Some(usize::MAX), ..args() },
            LoadArgs { records: Some(0), ..args() },
            LoadArgs { duration: Some(Duration::ZERO), ..args() },
        ];
        for args in odd {
            assert!(Load::new(Mode::Write, &args).is_err(), "{args:?}");
        }
        let slow = LoadArgs { rate: Some(1e-20), clients: COUNT_MAX, ..args() };
        assert!(Load::new(Mode::Write, &slow).is_ok());
        let many = LoadArgs { subscribers: Some(COUNT_MAX + 1), ..args() };
        assert!(Load::new(Mode::E2e, &many).is_err());
    }

    #[test]
    fn a_warm_up_has_an_end() {
        let many = LoadArgs { records: Some(10_000_000_000), ..args() };
        let load = Load::new(Mode::Read, &many).unwrap().with_records_there(300);
        assert_eq!(load.warmup, Phase { records: Some(300), duration: Some(WARMUP_MAX) });
    }
}
