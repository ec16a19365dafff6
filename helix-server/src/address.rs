//! Addresses that other programs dial: `host:port`. Pure.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::limits::ADDRESS_BYTES_MAX;

/// Checks that `text` is an address that can be dialed.
///
/// # Errors
/// What is wrong with it, and the form to write.
pub fn check_dialable(text: &str) -> Result<(), String> {
    problem(text).map_or(Ok(()), |what| {
        Err(format!("write it as host:port, as in n1.example:9092 or [2001:db8::1]:9092; {what}"))
    })
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
        return match host.strip_suffix(']').and_then(|host| host.parse::<Ipv6Addr>().ok()) {
            Some(host) if host.is_unspecified() => Some("the wildcard address cannot be dialed"),
            Some(_) => None,
            None => Some("the brackets must hold an IPv6 address"),
        };
    }
    if host.contains(':') {
        return Some("an IPv6 address must be in brackets");
    }
    if host.parse::<Ipv4Addr>().is_ok_and(|host| host.is_unspecified()) {
        return Some("the wildcard address cannot be dialed");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_names_and_addresses_with_a_port() {
        for right in ["n1:9092", "n1.example:1", "127.0.0.1:65535", "[::1]:9092", "my_pod-0.svc:9"]
        {
            check_dialable(right).unwrap();
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
}
