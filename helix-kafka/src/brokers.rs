//! The gateways of a cluster, which are the brokers that Kafka's clients see.
//!
//! One gateway runs beside each node. The broker of a partition is the gateway beside the
//! partition's leader, so that the gateway's own calls stay on one machine. Any gateway can serve
//! any partition. So a gateway that does not answer is left out, and the next one takes its place.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// Interval between checks of the other gateways.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Timeout of a check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// Failed checks in a row after which a gateway is left out.
const FAILURES_MAX: u32 = 2;

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    /// Host name or IP address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some((host, port)) = text.rsplit_once(':') else {
            return Err(format!("{text:?} has no port; write HOST:PORT"));
        };
        let host = host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(host);
        let is_valid = |c: char| c.is_ascii_alphanumeric() || ".-_:".contains(c);
        if host.is_empty() || host.len() > 255 || !host.chars().all(is_valid) {
            return Err(format!("{text:?} has no valid host; write HOST:PORT"));
        }
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self { host: host.to_owned(), port }),
            _ => Err(format!("port {port:?} is not a number from 1 to 65535")),
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(formatter, "[{}]:{}", self.host, self.port),
            false => write!(formatter, "{}:{}", self.host, self.port),
        }
    }
}

/// A gateway of the table: NODE=HOST:PORT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayOfNode {
    /// Node beside which the gateway runs; also the broker's id.
    pub node_id: i32,
    /// Address that Kafka's clients dial.
    pub address: HostPort,
}

impl FromStr for GatewayOfNode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some((node, address)) = text.split_once('=') else {
            return Err(format!("{text:?} names no node; write NODE=HOST:PORT"));
        };
        match node.parse() {
            Ok(node_id) if node_id > 0 => Ok(Self { node_id, address: address.parse()? }),
            _ => Err(format!("node {node:?} is not a number from 1 to {}", i32::MAX)),
        }
    }
}

/// The gateways of a cluster.
#[derive(Debug)]
pub(crate) struct GatewayTable {
    gateways: Vec<KnownGateway>,
    /// Index of this gateway.
    own: usize,
}

#[derive(Debug)]
struct KnownGateway {
    gateway: GatewayOfNode,
    /// Failed checks in a row.
    failures: AtomicU32,
}

impl KnownGateway {
    fn is_up(&self) -> bool {
        self.failures.load(Ordering::Relaxed) < FAILURES_MAX
    }
}

impl GatewayTable {
    /// Returns the table of a gateway that serves the whole cluster alone, as broker 1.
    pub(crate) fn single(address: HostPort) -> Self {
        let gateway = GatewayOfNode { node_id: 1, address };
        let known = KnownGateway { gateway, failures: AtomicU32::new(0) };
        Self { gateways: vec![known], own: 0 }
    }

    /// Returns the table of one gateway beside each node, of which one has the address `own`.
    ///
    /// # Errors
    /// Two gateways share a node or an address, or none has the address `own`.
    pub(crate) fn new(mut gateways: Vec<GatewayOfNode>, own: &HostPort) -> Result<Self, String> {
        gateways.sort_by_key(|gateway| gateway.node_id);
        for (index, gateway) in gateways.iter().enumerate() {
            let before = &gateways[..index];
            if before.iter().any(|other| other.node_id == gateway.node_id) {
                return Err(format!("two gateways are beside node {}", gateway.node_id));
            }
            if before.iter().any(|other| other.address == gateway.address) {
                return Err(format!("two gateways have the address {}", gateway.address));
            }
        }
        let Some(index) = gateways.iter().position(|gateway| gateway.address == *own) else {
            return Err(format!("no gateway has the advertised address {own} of this one"));
        };
        let known = |gateway| KnownGateway { gateway, failures: AtomicU32::new(0) };
        Ok(Self { gateways: gateways.into_iter().map(known).collect(), own: index })
    }

    /// Returns this gateway.
    pub(crate) fn own(&self) -> &GatewayOfNode {
        &self.gateways[self.own].gateway
    }

    /// Returns true if this is the only gateway.
    pub(crate) fn is_single(&self) -> bool {
        self.gateways.len() == 1
    }

    /// Returns the gateways that answer, in the order of their nodes.
    pub(crate) fn up(&self) -> impl Iterator<Item = &GatewayOfNode> {
        self.gateways.iter().filter(|known| known.is_up()).map(|known| &known.gateway)
    }

    /// Returns the gateway beside a node. If it does not answer, or there is none, the next one.
    pub(crate) fn beside(&self, node_id: u64) -> &GatewayOfNode {
        let from = self.gateways.partition_point(|known| {
            u64::try_from(known.gateway.node_id).is_ok_and(|known| known < node_id)
        });
        let (before, after) = self.gateways.split_at(from);
        let next = after.iter().chain(before).find(|known| known.is_up());
        next.map_or_else(|| self.own(), |known| &known.gateway)
    }

    /// Returns the gateway that has the members of a group: its name selects it among those that
    /// answer.
    pub(crate) fn of_group(&self, group: &str) -> &GatewayOfNode {
        let from = crc32c::crc32c(group.as_bytes()) as usize % self.gateways.len();
        let (before, after) = self.gateways.split_at(from);
        let next = after.iter().chain(before).find(|known| known.is_up());
        next.map_or_else(|| self.own(), |known| &known.gateway)
    }

    /// Checks the other gateways until it is dropped.
    pub(crate) async fn watch(&self) {
        if self.is_single() {
            return std::future::pending().await;
        }
        loop {
            for (index, known) in self.gateways.iter().enumerate() {
                if index == self.own {
                    continue;
                }
                let HostPort { host, port } = &known.gateway.address;
                let connecting = TcpStream::connect((host.as_str(), *port));
                let is_reached =
                    timeout(CHECK_TIMEOUT, connecting).await.is_ok_and(|it| it.is_ok());
                known.note(is_reached);
            }
            sleep(CHECK_INTERVAL).await;
        }
    }
}

impl KnownGateway {
    fn note(&self, is_reached: bool) {
        let was_up = self.is_up();
        let failures = match is_reached {
            true => 0,
            false => self.failures.load(Ordering::Relaxed).saturating_add(1),
        };
        self.failures.store(failures, Ordering::Relaxed);
        let GatewayOfNode { node_id, address } = &self.gateway;
        match (was_up, self.is_up()) {
            (true, false) => tracing::warn!(node_id, %address, "gateway does not answer"),
            (false, true) => tracing::info!(node_id, %address, "gateway answers again"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> GatewayTable {
        let gateways = ["2=b:2", "1=a:1", "3=[::1]:3"].map(|text| text.parse().unwrap());
        GatewayTable::new(gateways.to_vec(), &"b:2".parse().unwrap()).unwrap()
    }

    #[test]
    fn partition_of_a_node_goes_to_the_gateway_beside_it() {
        let table = table();
        assert_eq!(table.own().node_id, 2);
        assert_eq!([1, 2, 3, 9].map(|node| table.beside(node).node_id), [1, 2, 3, 1]);
        assert_eq!(table.beside(3).address.to_string(), "[::1]:3");
    }

    #[test]
    fn next_gateway_takes_the_place_of_a_silent_one() {
        let table = table();
        table.gateways[2].note(false);
        assert_eq!(table.beside(3).node_id, 3, "one failure is not enough");
        table.gateways[2].note(false);
        assert_eq!(table.beside(3).node_id, 1);
        assert_eq!(table.up().count(), 2);
        table.gateways[2].note(true);
        assert_eq!(table.beside(3).node_id, 3);
    }

    #[test]
    fn groups_are_divided_and_move_only_from_a_silent_gateway() {
        let table = table();
        let of = |table: &GatewayTable, number: u32| table.of_group(&format!("g{number}")).node_id;
        let before: Vec<_> = (0..30).map(|number| of(&table, number)).collect();
        assert!([1, 2, 3].iter().all(|node| before.contains(node)), "{before:?}");
        table.gateways[0].note(false);
        table.gateways[0].note(false);
        for (number, &node) in (0..).zip(&before) {
            assert_eq!(of(&table, number), if node == 1 { 2 } else { node });
        }
    }

    #[test]
    fn rejects_ambiguous_tables() {
        let parse = |texts: &[&str]| {
            let gateways = texts.iter().map(|text| text.parse().unwrap()).collect();
            GatewayTable::new(gateways, &HostPort { host: "a".to_owned(), port: 1 })
        };
        assert!(parse(&["1=a:1"]).is_ok());
        assert!(parse(&["1=a:1", "1=b:1"]).unwrap_err().contains("node 1"));
        assert!(parse(&["1=a:1", "2=a:1"]).unwrap_err().contains("a:1"));
        assert!(parse(&["1=b:1"]).unwrap_err().contains("advertised"));
        for text in ["a:1", "0=a:1", "1=a", "1=:1", "1=a:0", "1=a b:1", "x=a:1"] {
            assert!(text.parse::<GatewayOfNode>().is_err(), "{text}");
        }
    }
}
