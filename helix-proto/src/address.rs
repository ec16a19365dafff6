//! Addresses of nodes, `host:port` or `unix:PATH`, as programs and people write them. Pure.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Port of a node's API if an address may leave it out.
pub const PORT_DEFAULT: u16 = 9092;

/// Largest size of an address in bytes.
pub const ADDRESS_BYTES_MAX: usize = 260;

/// Scheme of the address of a Unix domain socket, `unix:/run/helix/helix.sock`.
pub const UNIX_SCHEME: &str = "unix:";

/// Size of the kernel's field for the path of a socket, in bytes (`sun_path`, unix(7)).
pub const UNIX_PATH_FIELD_BYTES: usize = if cfg!(target_os = "linux") { 108 } else { 104 };

/// Checks that `text` is an address that can be dialed, which a wildcard address is not.
///
/// # Errors
/// The problem, and the form to write.
pub fn check_dialable(text: &str) -> Result<(), String> {
    let wildcard = is_wildcard(text).then_some("the wildcard address cannot be dialed");
    problem(text).or(wildcard).map_or(Ok(()), |what| Err(explain(what)))
}

/// Returns the path of an address that names a Unix domain socket; unchecked.
pub fn unix_path(address: &str) -> Option<&str> {
    let path = address.strip_prefix(UNIX_SCHEME)?;
    // The form of a URL, with an empty host.
    Some(path.strip_prefix("//").unwrap_or(path))
}

/// Parses the address of a Unix domain socket, `unix:PATH` or `unix://PATH`, and returns the path.
///
/// # Errors
/// The problem, and the form to write.
pub fn parse_unix(text: &str) -> Result<String, String> {
    let wanted =
        |what: &str| format!("write it as unix:PATH, as in unix:/run/helix/helix.sock; {what}");
    let path = unix_path(text.trim()).ok_or_else(|| wanted("it does not begin with unix:"))?;
    let bytes_max = UNIX_PATH_FIELD_BYTES - 1;
    if path.is_empty() {
        return Err(wanted("the path is missing"));
    }
    if !path.starts_with('/') {
        return Err(wanted("the path must be absolute"));
    }
    if path.ends_with('/') {
        return Err(wanted("the path must name a file, not a directory"));
    }
    if path.contains(char::is_control) {
        return Err(wanted("the path must not contain control characters"));
    }
    if path.len() > bytes_max {
        let bytes = path.len();
        return Err(wanted(&format!(
            "the path has {bytes} bytes, and the system allows {bytes_max} \
             ({UNIX_PATH_FIELD_BYTES} with the final zero byte)"
        )));
    }
    Ok(path.to_owned())
}

/// Parses the address of a node to connect to, and returns it as `host:port` or `unix:PATH`.
///
/// Ignores blanks around the address and a leading `http://`. Appends `port_default` to an address
/// without a port.
///
/// # Errors
/// The problem, and the form to write.
pub fn parse(text: &str, port_default: Option<u16>) -> Result<String, String> {
    let address = text.trim();
    if address.starts_with(UNIX_SCHEME) {
        return parse_unix(address).map(|path| format!("{UNIX_SCHEME}{path}"));
    }
    let address = address.strip_prefix("http://").unwrap_or(address);
    if address.is_empty() {
        return Err(explain("it is empty"));
    }
    // A URL of another scheme has a problem of its own.
    if address.contains('/') && !address.contains("://") {
        return Err(explain("it must not have a path"));
    }
    // The colons of an IPv6 address are in brackets.
    let after_host = address.rsplit_once(']').map_or(address, |(_, after)| after);
    let address = match port_default {
        Some(port) if !after_host.contains(':') => format!("{address}:{port}"),
        _ => address.to_owned(),
    };
    problem(&address).map_or(Ok(address), |what| Err(explain(what)))
}

/// Parses a list of addresses that commas separate, as [`parse`] does it with each.
///
/// # Errors
/// The first address that is not valid, its problem, and the form to write.
pub fn parse_list(text: &str, port_default: Option<u16>) -> Result<Vec<String>, String> {
    let address = |text: &str| {
        let parsed = parse(text, port_default);
        parsed.map_err(|what| format!("address {:?}: {what}", text.trim()))
    };
    text.split(',').map(address).collect()
}

fn explain(what: &str) -> String {
    format!("write it as host:port, as in n1.example:9092 or [2001:db8::1]:9092; {what}")
}

fn problem(text: &str) -> Option<&'static str> {
    if text.len() > ADDRESS_BYTES_MAX {
        return Some("it may have at most 260 bytes");
    }
    if text.contains(char::is_whitespace) {
        return Some("it must not contain blanks");
    }
    if text.contains("://") {
        return Some("it must not be a URL");
    }
    let Some((host, port)) = text.rsplit_once(':') else { return Some("the port is missing") };
    let is_number = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(0) => return Some("port 0 cannot be dialed"),
        Ok(1..) if is_number => {}
        _ => return Some("the port must be a number in 1..=65535"),
    }
    if let Some(host) = host.strip_prefix('[') {
        let host = host.strip_suffix(']').and_then(|host| host.parse::<Ipv6Addr>().ok());
        return host.is_none().then_some("the brackets must hold an IPv6 address");
    }
    if host.contains(':') {
        return Some("an IPv6 address must be in brackets");
    }
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if host.is_empty() {
        return Some("the host is missing");
    }
    if !host.bytes().all(is_allowed) {
        return Some("a host name has ASCII letters, digits, '-', '.' and '_'");
    }
    None
}

/// Returns true if the host of an address without problems is `0.0.0.0` or `[::]`.
fn is_wildcard(text: &str) -> bool {
    let host = text.rsplit_once(':').map_or(text, |(host, _)| host);
    let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match v6 {
        Some(host) => host.parse::<Ipv6Addr>().is_ok_and(|host| host.is_unspecified()),
        None => host.parse::<Ipv4Addr>().is_ok_and(|host| host.is_unspecified()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_names_and_addresses_with_a_port() {
        for right in ["n1:9092", "n1.example:1", "127.0.0.1:65535", "[::1]:9092", "my_pod-0.svc:9"]
        {
            check_dialable(right).unwrap();
            assert_eq!(parse(right, None).unwrap(), right);
        }
    }

    #[test]
    fn rejects_what_cannot_be_dialed_and_says_why() {
        let long = format!("{}:9092", "n".repeat(260));
        let rows = [
            ("n1", "the port is missing"),
            ("", "the port is missing"),
            (":9092", "the host is missing"),
            ("n1:", "the port must be a number"),
            ("n1:0", "port 0"),
            ("n1:65536", "1..=65535"),
            ("n1:+90", "the port must be a number"),
            ("n1:-1", "the port must be a number"),
            ("::1:9092", "in brackets"),
            ("[::1:9092", "the brackets must hold"),
            ("[n1]:9092", "the brackets must hold"),
            ("[::]:9092", "wildcard"),
            ("0.0.0.0:9092", "wildcard"),
            ("http://n1:9092", "a URL"),
            ("n1:9092/path", "the port must be a number"),
            ("user@n1:9092", "a host name"),
            (" n1:9092", "blanks"),
            ("n1: 9092", "blanks"),
            ("n1:9092\n", "blanks"),
            ("b\u{fc}cher:9092", "a host name"),
            (&long, "at most 260 bytes"),
        ];
        for (wrong, what) in rows {
            let said = check_dialable(wrong).unwrap_err();
            assert!(said.contains(what) && said.contains("host:port"), "{wrong:?}: {said}");
        }
    }

    #[test]
    fn parses_addresses_as_people_write_them() {
        for (text, address) in [
            ("n1", "n1:9092"),
            ("n1:1", "n1:1"),
            (" n1:1\t", "n1:1"),
            ("http://n1", "n1:9092"),
            ("http://n1:1", "n1:1"),
            ("[::1]", "[::1]:9092"),
            ("[::1]:1", "[::1]:1"),
            ("0.0.0.0:1", "0.0.0.0:1"),
        ] {
            assert_eq!(parse(text, Some(PORT_DEFAULT)).unwrap(), address, "{text:?}");
        }
        assert_eq!(parse_list("n1, n2:2 ,\tn3", Some(1)).unwrap(), ["n1:1", "n2:2", "n3:1"]);
    }

    #[test]
    fn rejects_addresses_that_would_be_another_one() {
        for (wrong, what) in [
            ("", "it is empty"),
            (" ", "it is empty"),
            ("http://", "it is empty"),
            ("n1:", "the port must be a number"),
            ("n1:0", "port 0"),
            ("n1:99999", "1..=65535"),
            ("n1:9092/", "a path"),
            ("http://n1:9092/metrics", "a path"),
            ("https://n1:9092", "a URL"),
            ("n1 :9092", "blanks"),
            ("n1 n2:9092", "blanks"),
            ("::1", "in brackets"),
            ("fe80::1", "in brackets"),
            ("n1:9092?a", "the port must be a number"),
        ] {
            let said = parse(wrong, Some(PORT_DEFAULT)).unwrap_err();
            assert!(said.contains(what) && said.contains("host:port"), "{wrong:?}: {said}");
        }
        let said = parse_list("n1:1,n2:x", None).unwrap_err();
        assert!(said.starts_with("address \"n2:x\": "), "{said}");
        assert!(parse_list("n1:1,", None).is_err());
        assert!(parse("n1", None).unwrap_err().contains("the port is missing"));
    }

    #[test]
    fn parses_addresses_of_unix_sockets() {
        for (text, address) in [
            ("unix:/run/helix.sock", "unix:/run/helix.sock"),
            ("unix:///run/helix.sock", "unix:/run/helix.sock"),
            (" unix:/a b/c\t", "unix:/a b/c"),
        ] {
            assert_eq!(parse(text, Some(PORT_DEFAULT)).unwrap(), address, "{text:?}");
            assert_eq!(unix_path(address), Some(&address[5..]));
        }
        let list = parse_list("unix:/a,n1", Some(1)).unwrap();
        assert_eq!(list, ["unix:/a", "n1:1"]);
        assert_eq!(unix_path("n1:9092"), None);
        // A node announces no socket to other machines.
        check_dialable("unix:/a").unwrap_err();
    }

    #[test]
    fn rejects_paths_that_no_socket_can_have() {
        let long = |bytes: usize| format!("unix:/{}", "p".repeat(bytes - 1));
        parse(&long(UNIX_PATH_FIELD_BYTES - 1), None).unwrap();
        let (too_long, limit) = (long(UNIX_PATH_FIELD_BYTES), UNIX_PATH_FIELD_BYTES.to_string());
        for (wrong, what) in [
            ("unix:", "the path is missing"),
            ("unix://", "the path is missing"),
            ("unix:helix.sock", "must be absolute"),
            ("unix:9092", "must be absolute"),
            ("unix://run/helix.sock", "must be absolute"),
            ("unix:/run/", "not a directory"),
            ("unix:/a\0b", "control characters"),
            (too_long.as_str(), limit.as_str()),
        ] {
            let said = parse(wrong, Some(PORT_DEFAULT)).unwrap_err();
            assert!(said.contains(what) && said.contains("unix:PATH"), "{wrong:?}: {said}");
        }
        assert!(parse_unix("/run/helix.sock").unwrap_err().contains("does not begin with unix:"));
    }
}
