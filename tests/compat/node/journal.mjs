// A delivery log that many processes append to, with waits for its contents.
//
// The one idea: the file is the state. Members, in this process or another, append events, and waiting code reads the
// file as it grows. So the log of a killed member contains exactly what it had done.

import { closeSync, openSync, readSync, writeSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'

const POLL_MS = 10
const WAIT_MS = 45_000

export const partitionKey = (topic, partition) => `${topic}-${partition}`

export function allOf(topic, count) {
  return Array.from({ length: count }, (_, partition) => partitionKey(topic, partition))
}

/** Appends events. Each write is one call on a file opened for appending, so that processes may share the file. */
export class Journal {
  constructor(path) {
    this.path = path
    this.file = openSync(path, 'a')
  }

  close() {
    closeSync(this.file)
  }

  scenario({ topic, partitions, cooperative = false, redeliveryAllowed = false, ...more }) {
    const mode = cooperative ? 'cooperative' : 'eager'
    this.write([{ event: 'scenario', mode, topic, partitions, redelivery_allowed: redeliveryAllowed, ...more }])
  }

  produced(topic, partition, offset) {
    this.write([{ event: 'produced', topic, partition, offset }])
  }

  delivered(member, topic, partition, offset) {
    this.write([{ event: 'delivered', member, topic, partition, offset }])
  }

  /** `event` is assigned, revoked or lost; `partitions` are {topic, partition}. */
  ownership(event, member, partitions) {
    this.write(partitions.map(({ topic, partition }) => ({ event, member, topic, partition })))
  }

  /** `event` is closed or killed. */
  ended(event, member) {
    this.write([{ event, member, partition: -1 }])
  }

  write(entries) {
    // Times are whole milliseconds. Events of one millisecond keep the order of the file, which is the order of the
    // writes.
    const t = Date.now()
    const lines = entries.map(entry => JSON.stringify({ t, ...entry }) + '\n').join('')
    if (lines) writeSync(this.file, lines)
  }
}

/** The partitions that one member owns. Each change is logged immediately. */
export class Ownership {
  constructor(journal, member) {
    this.journal = journal
    this.member = member
    this.owned = new Map()
  }

  owns(topic, partition) {
    return this.owned.has(partitionKey(topic, partition))
  }

  assigned(partitions) {
    for (const { topic, partition } of partitions) this.owned.set(partitionKey(topic, partition), { topic, partition })
    this.journal.ownership('assigned', this.member, partitions)
  }

  /** Ends the ownership of all partitions. `event` is revoked or lost. */
  all(event) {
    const partitions = [...this.owned.values()]
    this.owned.clear()
    this.journal.ownership(event, this.member, partitions)
  }

  delivered(topic, partition, offset) {
    this.journal.delivered(this.member, topic, partition, Number(offset))
  }

  closed() {
    this.owned.clear()
    this.journal.ended('closed', this.member)
  }
}

/** The state that a growing log describes: the owners of partitions, and the produced and delivered records. */
export class View {
  constructor(path) {
    this.file = openSync(path, 'r')
    this.position = 0
    this.rest = Buffer.alloc(0)
    this.owned = new Map()
    this.delivered = new Map()
    this.deliveries = 0
    this.deliveredBy = new Map()
    this.produced = new Set()
    this.rounds = new Map()
    this.failures = []
  }

  refresh() {
    const buffer = Buffer.alloc(1 << 16)
    for (;;) {
      const count = readSync(this.file, buffer, 0, buffer.length, this.position)
      if (count === 0) break
      this.position += count
      this.rest = Buffer.concat([this.rest, buffer.subarray(0, count)])
    }
    const end = this.rest.lastIndexOf(10) + 1
    const lines = this.rest.subarray(0, end).toString().split('\n').filter(Boolean)
    this.rest = this.rest.subarray(end)
    for (const line of lines) this.take(JSON.parse(line))
  }

  take(entry) {
    const key = partitionKey(entry.topic, entry.partition)
    const record = `${key}@${entry.offset}`
    const { member } = entry
    if (entry.event === 'assigned') {
      if (!this.owned.has(member)) this.owned.set(member, new Set())
      this.owned.get(member).add(key)
      this.rounds.set(member, (this.rounds.get(member) ?? 0) + 1)
    } else if (entry.event === 'revoked' || entry.event === 'lost') {
      this.owned.get(member)?.delete(key)
    } else if (entry.event === 'closed' || entry.event === 'killed') {
      this.owned.delete(member)
    } else if (entry.event === 'delivered') {
      this.delivered.set(record, (this.delivered.get(record) ?? 0) + 1)
      this.deliveredBy.set(member, (this.deliveredBy.get(member) ?? 0) + 1)
      this.deliveries += 1
    } else if (entry.event === 'produced') {
      this.produced.add(record)
    }
  }

  /** Waits until the log makes `predicate` true. If that takes too long, throws an error that lists the owners. */
  async waitFor(predicate, what, milliseconds = WAIT_MS) {
    const deadline = Date.now() + milliseconds
    for (;;) {
      this.refresh()
      if (this.failures.length) throw new Error(this.failures.join('; '))
      if (predicate()) return
      if (Date.now() > deadline) {
        const owned = [...this.owned].map(([member, keys]) => `${member}: ${[...keys].sort().join(' ')}`).sort()
        throw new Error(
          `${what}: not within ${milliseconds / 1000} s; owned: ${owned.join('; ')}; ` +
            `${this.delivered.size} of ${this.produced.size} records`
        )
      }
      await sleep(POLL_MS)
    }
  }

  /**
   * Waits until every partition has exactly one owner, all `members` own a balanced share, and no other member owns any
   * partition.
   */
  waitSettled(members, partitions, milliseconds) {
    const low = Math.floor(partitions.length / members.length)
    const high = Math.ceil(partitions.length / members.length)
    const settled = () => {
      const seen = new Set()
      for (const [member, keys] of this.owned) {
        if (!members.includes(member)) {
          if (keys.size) return false
          continue
        }
        for (const key of keys) {
          if (seen.has(key) || !partitions.includes(key)) return false
          seen.add(key)
        }
      }
      const balanced = members.every(member => {
        const count = this.owned.get(member)?.size ?? 0
        return low <= count && count <= high
      })
      return seen.size === partitions.length && balanced
    }
    return this.waitFor(settled, `${partitions.length} partitions settled over ${members.join(' ')}`, milliseconds)
  }

  /** Waits until every record produced so far was delivered. */
  async waitCaughtUp() {
    this.refresh()
    const wanted = [...this.produced]
    await this.waitFor(
      () => wanted.every(record => this.delivered.has(record)),
      `${wanted.length} records delivered`
    )
  }

  /** Waits for `count` more records. */
  async waitMore(count) {
    this.refresh()
    const wanted = this.deliveries + count
    await this.waitFor(() => this.deliveries >= wanted, `${count} more records delivered`)
  }
}
