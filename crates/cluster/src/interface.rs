//! Which of this host's addresses the other hosts of a job can reach.

use kolo_comm::Fault;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs, UdpSocket};

/// The address of this host on the way to that one. Nothing is sent.
pub fn toward(host: &str) -> Option<IpAddr> {
    const DISCARD_PORT: u16 = 9;
    let targets = (host, DISCARD_PORT).to_socket_addrs().ok()?;
    targets.into_iter().find_map(|target| {
        let any: IpAddr = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { [0u16; 8].into() };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(target).ok()?;
        Some(socket.local_addr().ok()?.ip())
    })
}

/// An address that was asked for, if one host and no other can have it: listening on all interfaces would open the job to
/// networks that it does not use.
pub fn checked(address: IpAddr) -> Result<IpAddr, Fault> {
    let plain = address.to_canonical();
    let what = match plain {
        _ if plain.is_unspecified() => "means every interface of the host",
        _ if plain.is_multicast() => "is a multicast address",
        IpAddr::V4(v4) if v4.is_broadcast() => "is the broadcast address",
        _ => return Ok(address),
    };
    Err(Fault::BadCall(format!(
        "--interface {address} {what}\n  hint: give the one address of this host on the network that the job uses (see `ip addr`), or leave it out"
    )))
}

/// The address to listen on: loopback if the job has one host, else the one on the way to the first host that can be
/// resolved.
pub fn choose(one_host: bool, hosts: &[String]) -> Result<IpAddr, Fault> {
    if one_host {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    let found: Vec<IpAddr> = hosts.iter().filter_map(|host| toward(host)).collect();
    // A host's own name often stands for its loopback address: only if nothing else is there, it is meant.
    let chosen = found.iter().find(|address| !address.is_loopback()).or(found.first());
    chosen.copied().ok_or_else(|| {
        let names = if hosts.is_empty() { "no host is named".into() } else { format!("tried {}", hosts.join(", ")) };
        Fault::BadCall(format!(
            "found no address of this host that the other hosts can reach: {names}\n  hint: check that the names of the hosts resolve, or give this host's address on the network to use (--interface)"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_no_single_host_has_are_refused() {
        for wrong in ["0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "ff02::1", "255.255.255.255"] {
            let text = checked(wrong.parse().unwrap()).unwrap_err().to_string();
            assert!(text.starts_with(&format!("--interface {}", wrong.parse::<IpAddr>().unwrap())), "{text}");
        }
        for right in ["127.0.0.1", "10.0.0.255", "::1", "fe80::1"] {
            assert_eq!(checked(right.parse().unwrap()).unwrap(), right.parse::<IpAddr>().unwrap());
        }
    }

    #[test]
    fn one_host_stays_inside_and_names_that_do_not_resolve_are_told() {
        assert!(choose(true, &[]).unwrap().is_loopback());
        assert_eq!(choose(false, &["127.0.0.1".into()]).unwrap(), Ipv4Addr::LOCALHOST);
        let text = choose(false, &["no.such.host.invalid".into()]).unwrap_err().to_string();
        assert!(text.contains("tried no.such.host.invalid"), "{text}");
    }
}
