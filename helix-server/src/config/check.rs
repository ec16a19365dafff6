//! What no single setting can check for itself: ranges, and settings that exclude each other.
//! Every problem is found, not only the first one.

use std::fmt::{self, Display};
use std::net::SocketAddr;

use super::Config;
use super::values::has_port;
use crate::limits::{BATCH_BYTES_MAX, SHARDS_MAX};
use crate::memory::{MEMORY_LIMIT_MIN, Shares};

/// Segments are preallocated, and several are kept ready: what the log takes at most.
const SEGMENT_BYTES_MAX: u64 = 1 << 30;

/// What a segment is a multiple of: a block of the log.
const SEGMENT_STEP: u64 = 4 << 10;

/// A segment must hold the largest batch well, or batches would decide where segments end.
const SEGMENT_BYTES_MIN: u64 = 2 * BATCH_BYTES_MAX as u64;

/// Other nodes that one may be told of. Which numbers form a cluster is seen when it is formed: a
/// node that is to be added to one names those that are there.
const OTHERS_MAX: usize = 5;

/// Below this a shard would do little but write checkpoints.
const CHECKPOINT_BYTES_MIN: u64 = 64 << 10;

/// A replica id has 32 bits for the node.
const NODE_IDS: std::ops::RangeInclusive<u64> = 1..=u32::MAX as u64;

/// Everything that is wrong with a configuration, a line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Never empty.
    pub problems: Vec<String>,
}

impl Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problems.join("\n"))
    }
}

impl std::error::Error for ConfigError {}

/// A value that makes no sense, alone or beside the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    /// Its flag, without the dashes.
    pub(super) flag: &'static str,
    pub(super) value: String,
    pub(super) what: String,
}

impl Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { flag, value, what } = self;
        write!(f, "--{flag} {value}: {what}")
    }
}

impl Config {
    /// Checks what no single flag can check for itself.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let problems: Vec<String> = self.faults().iter().map(Fault::to_string).collect();
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }

    pub(super) fn faults(&self) -> Vec<Fault> {
        let mut faults = Faults::default();
        faults.unless(
            NODE_IDS.contains(&self.node_id),
            "node-id",
            &self.node_id,
            "choose a number in 1..=4294967295",
        );
        if let Some(shards) = self.shards {
            faults.unless(
                (1..=SHARDS_MAX).contains(&shards),
                "shards",
                &shards,
                "choose a number in 1..=64",
            );
        }
        let segment_sizes = SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX;
        let is_size = segment_sizes.contains(&self.segment_bytes)
            && self.segment_bytes.is_multiple_of(SEGMENT_STEP);
        let what = "choose 16MiB to 1GiB, a multiple of 4KiB";
        faults.unless(is_size, "segment-bytes", &self.segment_bytes, what);
        self.check_memory(&mut faults);
        let is_sparing = self.checkpoint_bytes >= CHECKPOINT_BYTES_MIN;
        let what = "choose at least 64KiB";
        faults.unless(is_sparing, "checkpoint-bytes", &self.checkpoint_bytes, what);
        let is_named = self.cluster_id.as_ref().is_none_or(|name| !name.is_empty());
        faults.unless(is_named, "cluster-id", &"", "give it a name, or leave the flag out");
        for (place, (name, _)) in self.topics.iter().enumerate() {
            let is_new = self.topics[..place].iter().all(|(earlier, _)| earlier != name);
            faults.unless(is_new, "topic", name, "is there twice; give each topic once");
        }
        self.check_peers(&mut faults);
        self.check_addresses(&mut faults);
        faults.0
    }

    /// The limit must reach for what the settings ask of it.
    fn check_memory(&self, faults: &mut Faults) {
        let limit = show_bytes(self.memory_limit);
        if self.memory_limit < MEMORY_LIMIT_MIN {
            let what = format!("choose at least {}", show_bytes(MEMORY_LIMIT_MIN));
            return faults.unless(false, "memory-limit", &limit, &what);
        }
        let (shards, tail) = (self.shard_count(), self.tail_bytes());
        let fits = self.shares().footer_bytes(shards, tail).is_some();
        let least = show_bytes(Shares::limit_for(shards, tail));
        let logs = show_bytes(self.shares().logs);
        if self.tail_bytes.is_some() {
            let what = format!(
                "the logs' share of --memory-limit {limit} is {logs}, too little for such a tail \
                 in {shards} shards; choose less, or --memory-limit {least}"
            );
            return faults.unless(fits, "tail-bytes", &show_bytes(tail), &what);
        }
        let what = format!(
            "the logs' share of --memory-limit {limit} is {logs}, too little for so many; choose \
             fewer, or --memory-limit {least}"
        );
        let is_number = (1..=SHARDS_MAX).contains(&shards);
        faults.unless(fits || !is_number, "shards", &shards, &what);
    }

    fn check_peers(&self, faults: &mut Faults) {
        for (place, (id, address)) in self.peers.iter().enumerate() {
            let shown = format!("{id}={address}");
            faults.unless(
                NODE_IDS.contains(id),
                "peer",
                &shown,
                "a node's number is in 1..=4294967295",
            );
            let is_new = self.peers[..place].iter().all(|(earlier, _)| earlier != id);
            faults.unless(is_new, "peer", &shown, "this node is there twice; give each node once");
        }
        faults.unless(
            self.other_nodes().len() <= OTHERS_MAX,
            "peer",
            &self.peers.len(),
            "a cluster has at most 5 nodes",
        );
    }

    fn check_addresses(&self, faults: &mut Faults) {
        if let Some(advertised) = &self.advertise_addr {
            faults.unless(
                has_port(advertised),
                "advertise-addr",
                advertised,
                "give it as host:port",
            );
        }
        let is_dialable = self.advertise_addr.is_some() || !self.listen_addr.ip().is_unspecified();
        faults.unless(
            is_dialable,
            "listen-addr",
            &self.listen_addr,
            "this listens on all addresses, and clients cannot dial it; say which one they reach \
             with --advertise-addr host:port",
        );
        for (flag, addr) in self.exposed() {
            faults.unless(
                self.insecure,
                flag,
                &addr,
                "others than this machine can reach this address, and there is neither encryption \
                 nor authentication yet; listen on 127.0.0.1, or add --insecure if whoever reaches \
                 it may do everything",
            );
        }
    }

    /// The addresses listened on that others than this machine can reach, with their flags.
    pub fn exposed(&self) -> Vec<(&'static str, SocketAddr)> {
        let has_peers = !self.peers.is_empty();
        let clients = Some(("listen-addr", self.listen_addr));
        let peers = has_peers.then_some(("peer-addr", self.peer_addr));
        let admin = self.admin_listen_addr().map(|addr| ("admin-addr", addr));
        let listened = clients.into_iter().chain(peers).chain(admin);
        listened.filter(|(_, addr)| !addr.ip().is_loopback()).collect()
    }
}

#[derive(Default)]
struct Faults(Vec<Fault>);

impl Faults {
    fn unless(&mut self, is_right: bool, flag: &'static str, value: &dyn Display, what: &str) {
        if !is_right {
            self.0.push(Fault { flag, value: value.to_string(), what: what.to_owned() });
        }
    }
}

/// A number of bytes as people write it; rounded down where it is no whole number of MiB.
fn show_bytes(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => bytes.to_string(),
        _ => format!("{}MiB", bytes >> 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::AdminAddr;

    fn flags(config: &Config) -> Vec<&'static str> {
        config.faults().iter().map(|fault| fault.flag).collect()
    }

    #[test]
    fn the_memory_limit_must_reach_for_what_the_settings_ask() {
        let message = |config: &Config| config.validate().unwrap_err().to_string();
        let with_least = |config: &Config| {
            let said = message(config);
            let (_, least) = said.rsplit_once(' ').unwrap();
            let memory_limit = super::super::values::parse_bytes(least).unwrap();
            Config { memory_limit, ..config.clone() }
        };
        let default = Config::default();
        assert_eq!((default.memory_limit, default.tail_bytes()), (512 << 20, 16 << 20));
        let small = Config { memory_limit: 1 << 20, ..Config::default() };
        assert_eq!(message(&small), "--memory-limit 1MiB: choose at least 256MiB");
        let long = Config { tail_bytes: Some(200 << 20), ..Config::default() };
        assert_eq!(flags(&long), ["tail-bytes"]);
        with_least(&long).validate().unwrap();
        let many = Config { shards: Some(64), ..Config::default() };
        assert_eq!(flags(&many), ["shards"]);
        with_least(&many).validate().unwrap();
    }

    #[test]
    fn peers_are_few_and_each_is_there_once() {
        let peer = |id: u64| (id, format!("n{id}:9192"));
        let with = |peers: Vec<(u64, String)>| Config { peers, ..Config::default() };
        let three = with(vec![peer(1), peer(2), peer(3)]);
        three.validate().unwrap();
        assert_eq!(three.other_nodes().keys().copied().collect::<Vec<_>>(), [2, 3]);
        assert_eq!((three.node_count(), three.shard_count()), (3, 1));
        with(vec![peer(2), peer(3)]).validate().unwrap();
        with(vec![peer(2)]).validate().unwrap();
        assert!(with((2..=7).map(peer).collect()).validate().is_err(), "too many");
        assert!(with(vec![peer(2), peer(2)]).validate().is_err(), "twice");
        assert!(with(vec![peer(0), peer(2)]).validate().is_err(), "no such node");
    }

    #[test]
    fn an_error_names_the_flag_and_the_way_out() {
        let addr = "0.0.0.0:9092".parse().unwrap();
        let all = Config { listen_addr: addr, insecure: true, ..Config::default() };
        let message = all.validate().unwrap_err().to_string();
        assert!(message.starts_with("--listen-addr 0.0.0.0:9092: "), "{message}");
        assert!(message.contains("--advertise-addr host:port"), "{message}");
        let reachable = Config { advertise_addr: Some("n1:9092".to_owned()), ..all };
        reachable.validate().unwrap();
        let advertised = Config { advertise_addr: Some("n1".to_owned()), ..Config::default() };
        assert_eq!(flags(&advertised), ["advertise-addr"]);
        let with_segments = |segment_bytes| Config { segment_bytes, ..Config::default() };
        for bad in [1, SEGMENT_BYTES_MIN - SEGMENT_STEP, SEGMENT_BYTES_MIN + 1, 2 << 30] {
            assert_eq!(flags(&with_segments(bad)), ["segment-bytes"], "{bad}");
        }
        // What is taken here the log takes too.
        for segment_bytes in [SEGMENT_BYTES_MIN, SEGMENT_BYTES_MIN + SEGMENT_STEP, 1 << 30] {
            assert!(flags(&with_segments(segment_bytes)).is_empty());
            helix_wal::Options { segment_bytes, ..Default::default() }.check().unwrap();
        }
        let busy = Config { checkpoint_bytes: 1000, ..Config::default() };
        assert_eq!(flags(&busy), ["checkpoint-bytes"]);
        let twice = vec![("a".to_owned(), 1), ("a".to_owned(), 2)];
        assert_eq!(flags(&Config { topics: twice, ..Config::default() }), ["topic"]);
    }

    #[test]
    fn what_others_reach_must_be_asked_for() {
        let all = |port: u16| SocketAddr::from(([0, 0, 0, 0], port));
        let open = Config {
            listen_addr: all(9092),
            advertise_addr: Some("n1:9092".to_owned()),
            peer_addr: all(9192),
            ..Config::default()
        };
        assert_eq!(flags(&open), ["listen-addr"], "without peers nobody listens for them");
        let peers = vec![(2, "n2:9192".to_owned()), (3, "n3:9192".to_owned())];
        let cluster = Config { peers, ..open };
        assert_eq!(flags(&cluster), ["listen-addr", "peer-addr"]);
        let message = cluster.validate().unwrap_err().to_string();
        assert!(message.contains("--insecure"), "{message}");
        let admin_addr = Some(AdminAddr::At(all(9644)));
        assert_eq!(flags(&Config { admin_addr, ..Config::default() }), ["admin-addr"]);
        Config { insecure: true, ..cluster }.validate().unwrap();
    }

    #[test]
    fn every_problem_is_found() {
        let config = Config { node_id: 0, shards: Some(0), segment_bytes: 1, ..Config::default() };
        assert_eq!(flags(&config), ["node-id", "shards", "segment-bytes"]);
        let message = config.validate().unwrap_err().to_string();
        assert_eq!(message.lines().count(), 3, "{message}");
    }
}
