//! Parses single values: sizes, durations, addresses, topics, nodes.
//! Each error says which form is expected.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use helix_proto::address;
use tracing_subscriber::filter::Targets;

use super::{AdminAddr, SampleShare, SocketMode};
use crate::cluster::is_topic_name;

/// Longest duration, in seconds: its microseconds have 64 bits.
const SECONDS_MAX: u64 = u64::MAX / 1_000_000;

/// Parses an address to listen on. Rejects names, which may resolve differently at each start.
pub(super) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if text.starts_with(address::UNIX_SCHEME) {
        return Err(format!(
            "write an IP address and a port here, and add the socket with --listen-socket {text}"
        ));
    }
    text.parse().map_err(|_| {
        format!("write an IP address and a port, as in 127.0.0.1:9092 or [::1]:9092, not {text:?}")
    })
}

/// Parses an address, or "off".
pub(super) fn parse_admin_addr(text: &str) -> Result<AdminAddr, String> {
    if text == "off" {
        return Ok(AdminAddr::Off);
    }
    let addr = parse_address(text).map(AdminAddr::At);
    addr.map_err(|_| {
        format!("write an IP address and a port, as in 127.0.0.1:9644, or off, not {text:?}")
    })
}

/// Parses the address of a Unix domain socket to listen on, and returns its path.
pub(super) fn parse_socket(text: &str) -> Result<PathBuf, String> {
    address::parse_unix(text).map(PathBuf::from)
}

/// Parses the permissions of a file, in octal digits.
pub(super) fn parse_socket_mode(text: &str) -> Result<SocketMode, String> {
    let is_octal = (1..=4).contains(&text.len()) && text.bytes().all(|it| it.is_ascii_digit());
    match u32::from_str_radix(text, 8) {
        Ok(mode) if is_octal && mode <= SocketMode::MAX.0 => Ok(SocketMode(mode)),
        _ => Err(format!("write permissions in octal, as in 0660 or 0600, not {text:?}")),
    }
}

/// Parses a share from 0 to 1, to a millionth.
pub(super) fn parse_share(text: &str) -> Result<SampleShare, String> {
    let share = text.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
    let share =
        share.ok_or_else(|| format!("write a number from 0 to 1, as in 0.01, not {text:?}"))?;
    let millionths = (share * f64::from(SampleShare::WHOLE)).round() as u32;
    match millionths {
        0 if share > 0.0 => Err(format!("write at least 0.000001, or 0 for none, not {text:?}")),
        millionths => Ok(SampleShare(millionths)),
    }
}

pub(super) fn parse_topic(text: &str) -> Result<(String, u32), String> {
    let wanted = || format!("write name:partitions, as in orders:4, not {text:?}");
    // Blanks around the elements of a list.
    let (name, partitions) = text.trim().rsplit_once(':').ok_or_else(wanted)?;
    let partitions = partitions.parse().map_err(|_| wanted())?;
    if partitions == 0 {
        return Err(wanted());
    }
    if !is_topic_name(name) {
        return Err(format!(
            "a topic's name has 1 to 249 ASCII letters, digits, '.', '_' and '-', not {name:?}"
        ));
    }
    Ok((name.to_owned(), partitions))
}

pub(super) fn parse_peer(text: &str) -> Result<(u64, String), String> {
    let wanted = || format!("write id=host:port, as in 2=helix-2:9192, not {text:?}");
    // Blanks around the elements of a list.
    let (id, address) = text.trim().split_once('=').ok_or_else(wanted)?;
    let id = id.trim_end().parse().map_err(|_| wanted())?;
    address::check_dialable(address)
        .map_err(|what| format!("the address {address:?} of node {id} cannot be dialed: {what}"))?;
    Ok((id, address.to_owned()))
}

/// Parses a number of bytes: "67108864", "64MiB", "64M".
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    let wanted = || format!("write a number of bytes, as in 1048576, 64MiB or 2GiB, not {text:?}");
    let (number, unit) = split_unit(text).ok_or_else(wanted)?;
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(wanted()),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than {} bytes", u64::MAX))
}

/// Parses a duration in whole seconds: "0", "90s", "15m", "12h", "7d".
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let wanted = || format!("write a duration, as in 90s, 15m, 12h or 7d, not {text:?}");
    let (number, unit) = split_unit(text).ok_or_else(wanted)?;
    let seconds = match (number, unit) {
        (0, "") | (_, "s") => 1,
        (_, "m") => 60,
        (_, "h") => 60 * 60,
        (_, "d") => 24 * 60 * 60,
        (_, "w") => 7 * 24 * 60 * 60,
        _ => return Err(wanted()),
    };
    let fitting = number.checked_mul(seconds).filter(|seconds| *seconds <= SECONDS_MAX);
    fitting.map(Duration::from_secs).ok_or_else(|| {
        format!("{text} is longer than {}d; write 0 for no limit", SECONDS_MAX / (24 * 60 * 60))
    })
}

fn split_unit(text: &str) -> Option<(u64, &str)> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    Some((number.parse().ok()?, unit.trim()))
}

/// Parses a level, or levels of modules: "info", "warn,helix_server::peer=debug".
pub(super) fn parse_log_level(text: &str) -> Result<String, String> {
    match log_filter(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err(format!(
            "write off, error, warn, info, debug or trace, or levels of modules, as in \
             info,helix_server::peer=warn, not {text:?}"
        )),
    }
}

/// Returns the filter of levels, of which later ones override earlier ones; `None` for a wrong one.
pub(crate) fn log_filter(text: &str) -> Option<Targets> {
    // `Targets` takes an empty part for the level "error".
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let parts = parts.collect::<Vec<_>>().join(",");
    if parts.is_empty() { None } else { parts.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_sizes_and_durations() {
        assert_eq!(parse_bytes("64MiB").unwrap(), 64 << 20);
        assert_eq!(parse_bytes("2g").unwrap(), 2 << 30);
        assert_eq!(parse_bytes("1048576").unwrap(), 1 << 20);
        assert_eq!(parse_duration("7d").unwrap(), Duration::from_secs(7 * 24 * 3600));
        assert_eq!(parse_duration("0").unwrap(), Duration::ZERO);
        for wrong in ["", "x", "-1", "5q", "99999999999999999999", "9999999999999TiB"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong:?}");
            assert!(parse_duration(wrong).is_err(), "{wrong:?}");
        }
        assert!(parse_duration("5").is_err(), "a number without a unit is ambiguous");
        for wrong in ["500ms", "10us", "1y", "0.5s"] {
            assert!(parse_duration(wrong).unwrap_err().contains("as in 90s"), "{wrong:?}");
        }
        // Neither the default nor unlimited.
        parse_duration("213503982d").unwrap();
        for long in ["213503983d", "99999999999999999w", "18446744073709551615s"] {
            assert!(parse_duration(long).unwrap_err().contains("longer than 213503982d"), "{long}");
        }
        assert!(parse_bytes("16777216TiB").unwrap_err().contains("more than 18446744073709551615"));
    }

    #[test]
    fn parses_topics() {
        assert_eq!(parse_topic("orders:8").unwrap(), ("orders".to_owned(), 8));
        assert_eq!(parse_topic(" orders:8 ").unwrap(), ("orders".to_owned(), 8));
        let long = format!("{}:1", "n".repeat(250));
        for wrong in ["orders", "orders:", ":4", "orders:0", "orders:x", "or ders:4", &long] {
            assert!(parse_topic(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn parses_peers() {
        assert_eq!(parse_peer("2=n2:9192").unwrap(), (2, "n2:9192".to_owned()));
        assert_eq!(parse_peer(" 2=n2:9192 ").unwrap(), (2, "n2:9192".to_owned()));
        for wrong in [
            "n2:9192",
            "2=n2",
            "x=n2:9192",
            "2=",
            "=n2:1",
            "2= n2:1",
            "2=n2:0",
            "2=::1:9192",
            "2=http://n2:9192",
            "2=0.0.0.0:9192",
        ] {
            assert!(parse_peer(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn rejects_addresses_that_are_names() {
        assert_eq!(parse_address("[::1]:9").unwrap(), "[::1]:9".parse().unwrap());
        for wrong in ["localhost:9092", "127.0.0.1", ":9092", "127.0.0.1:99999"] {
            assert!(parse_address(wrong).unwrap_err().contains("127.0.0.1:9092"), "{wrong:?}");
        }
    }

    #[test]
    fn parses_sockets_and_their_permissions() {
        assert_eq!(parse_socket("unix:/run/h.sock").unwrap(), PathBuf::from("/run/h.sock"));
        for wrong in ["/run/h.sock", "unix:h.sock", "127.0.0.1:9092", ""] {
            assert!(parse_socket(wrong).unwrap_err().contains("unix:PATH"), "{wrong:?}");
        }
        let said = parse_address("unix:/run/h.sock").unwrap_err();
        assert!(said.contains("--listen-socket unix:/run/h.sock"), "{said}");
        for (text, mode) in [("0660", 0o660), ("600", 0o600), ("0777", 0o777), ("0", 0)] {
            assert_eq!(parse_socket_mode(text).unwrap(), SocketMode(mode));
        }
        for wrong in ["", "0880", "1777", "00660", "+660", "rw", "-1"] {
            assert!(parse_socket_mode(wrong).unwrap_err().contains("0660"), "{wrong:?}");
        }
    }

    #[test]
    fn parses_shares() {
        for (text, millionths) in [("0", 0), ("1", 1_000_000), ("0.01", 10_000), ("1e-6", 1)] {
            assert_eq!(parse_share(text).unwrap(), SampleShare(millionths));
        }
        for wrong in ["", "-0.1", "1.1", "NaN", "inf", "1%", "0.0000001"] {
            assert!(parse_share(wrong).unwrap_err().contains(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn parses_admin_addresses() {
        assert_eq!(parse_admin_addr("off").unwrap(), AdminAddr::Off);
        let addr = "0.0.0.0:9644";
        assert_eq!(parse_admin_addr(addr).unwrap(), AdminAddr::At(addr.parse().unwrap()));
        assert!(parse_admin_addr("none").unwrap_err().contains("or off"));
    }

    #[test]
    fn parses_log_levels_and_filters() {
        for right in ["off", "info,", "warn,openraft=error", "helix_server::peer=debug"] {
            assert_eq!(parse_log_level(right).unwrap(), right);
        }
        for wrong in ["", " ", ",", "helix=loud", "info,=x=y"] {
            assert!(parse_log_level(wrong).is_err(), "{wrong:?}");
        }
        let filter = log_filter("h2=error, info,,helix=warn,h2=off").unwrap();
        assert!(filter.would_enable("other", &tracing::Level::INFO));
        assert!(!filter.would_enable("helix::peer", &tracing::Level::INFO));
        assert!(!filter.would_enable("h2", &tracing::Level::ERROR), "the last one counts");
    }
}
