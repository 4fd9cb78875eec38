//! Tells which addresses are public.
//!
//! # Source
//! The IANA special-purpose address registries for IPv4 and IPv6.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether an address belongs to the public Internet: not to this machine or a private network, nor an encoding of such an
/// address.
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let is_special = match address.octets() {
        // "This network", private, loopback, link-local.
        [0 | 10 | 127, ..] | [169, 254, ..] | [192, 168, ..] => true,
        [172, second, ..] if second & 0xf0 == 16 => true,
        // Carrier-grade NAT, and benchmarks.
        [100, second, ..] if second & 0xc0 == 64 => true,
        [198, 18 | 19, ..] => true,
        // Protocol assignments, documentation, relays to IPv6.
        [192, 0, 0 | 2, _] | [198, 51, 100, _] | [203, 0, 113, _] | [192, 88, 99, _] => true,
        // Multicast, reserved, broadcast.
        [first, ..] => first >= 224,
    };
    !is_special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(mapped) = address.to_ipv4_mapped() {
        return is_public_v4(mapped);
    }
    match address.segments() {
        // Translated from IPv4 (64:ff9b::/96), and 6to4: judged by the embedded IPv4 address.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            is_public_v4(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)))
        }
        // Teredo, benchmarks, ORCHID, documentation.
        [0x2001, second, ..] if second < 0x200 || second == 0xdb8 => false,
        [0x3fff, second, ..] if second < 0x1000 => false,
        // Global unicast; unspecified, loopback, link-local, unique local and multicast are outside it.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}
