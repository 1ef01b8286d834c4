package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

func topicCommand(g *global) *cobra.Command {
	return parent(&cobra.Command{
		Use:     "topic",
		Short:   "Create, list, describe, alter, rename and drop topics",
		Long:    "A topic is a named log of messages. What each of these commands does, its own --help says.",
		Example: "  weir topic create events --retention-age 7d\n  weir topic list\n  weir topic describe events",
	}, topicCreateCommand(g), topicListCommand(g), topicDescribeCommand(g), topicAlterCommand(g), topicRenameCommand(g),
		topicCurrentCommand(g), topicDeleteKeyCommand(g), topicDropCommand(g))
}

// topicFlags are the flags of a topic's options that can be altered.
type topicFlags struct {
	segmentSize    int64
	retentionAge   lengthFlag
	retentionBytes sizeFlag
	dropUnread     bool
	restricted     bool
	idempotencyTTL lengthFlag
	tombstoneTTL   lengthFlag
}

// addFlags adds them. defaults says what they are when they are left out.
func (f *topicFlags) addFlags(cmd *cobra.Command, defaults bool) {
	by := func(text, value string) string {
		if !defaults {
			return text
		}
		return text + " (default " + value + ")"
	}
	flags := cmd.Flags()
	flags.Int64Var(&f.segmentSize, "segment-size", 0, by("ids per segment of the log, 1000 to 1000000000", "1000000"))
	flags.Var(&f.retentionAge, "retention-age", by("how long messages are kept at least", "for ever"))
	flags.Var(&f.retentionBytes, "retention-bytes", by("how many bytes of messages are kept at least, indexes included", "without limit"))
	flags.BoolVar(&f.dropUnread, "drop-unread", false, "retention also removes what a group has yet to finish")
	flags.BoolVar(&f.restricted, "restricted", false, "who produces or reads needs a right on the log, too")
	flags.Var(&f.idempotencyTTL, "idempotency-ttl", by("how long an idempotency key is remembered, 1s to 365d", "1d"))
	flags.Var(&f.tombstoneTTL, "tombstone-ttl", by("of a compacted topic: how long a tombstone is kept", "1d"))
}

const (
	year         = 365 * 24 * time.Hour
	optionsHelp  = `A length of time is written as 36h, 90m or 7d, a size as 500M or 10G: k, M, G and T are powers of 1024.`
	segmentLeast = 1000
	segmentMost  = 1_000_000_000
)

// check refuses what is out of range.
func (f *topicFlags) check(cmd *cobra.Command) error {
	given := cmd.Flags().Changed
	if given("segment-size") && (f.segmentSize < segmentLeast || f.segmentSize > segmentMost) {
		return usageOf(cmd, "--segment-size is %d, it must be from %d to %d", f.segmentSize, segmentLeast, segmentMost)
	}
	for _, l := range []struct {
		name, without, most string
		value, longest      lengthFlag
	}{
		{"retention-age", "for ever", "100 years", f.retentionAge, lengthFlag(100 * year)},
		{"idempotency-ttl", "1d", "365d", f.idempotencyTTL, lengthFlag(year)},
		{"tombstone-ttl", "1d", "100 years", f.tombstoneTTL, lengthFlag(100 * year)},
	} {
		if given(l.name) && (l.value < lengthFlag(time.Second) || l.value > l.longest) {
			return usageOf(cmd, "--%s is %s, it must be from 1s to %s; a new topic has %s without it", l.name, lengthText(time.Duration(l.value)), l.most, l.without)
		}
	}
	if given("retention-bytes") && f.retentionBytes < 1 {
		return usageOf(cmd, "--retention-bytes is %d, it must be at least 1; a new topic has no limit without it", f.retentionBytes)
	}
	return nil
}

func topicCreateCommand(g *global) *cobra.Command {
	var (
		o weir.TopicOptions
		f topicFlags
	)
	cmd := &cobra.Command{
		Use:   "create TOPIC",
		Short: "Create a topic",
		Long: `Creates a topic. One of that name that exists with the same format is left as it is, whatever its other options are.

The format cannot be changed later: json keeps the text of each payload byte for byte, jsonb stores payloads parsed, for
queries on the log (white space, key order and duplicate keys are lost), bytes stores anything.

Messages are kept for ever, unless --retention-age or --retention-bytes says otherwise. What is past either of them is
removed by whole segments, when all groups have finished it (--drop-unread: then too when they have not). With --compact
only the latest message of each key is kept; every message then needs a key, and this cannot be changed later.

With --restricted a role needs INSERT (payload) on the topic's log to produce, and SELECT (payload) to consume or read it,
besides EXECUTE on the functions.

` + optionsHelp,
		Example: `  weir topic create events --retention-age 7d --retention-bytes 10G
  weir topic create images --format bytes
  weir topic create customers --compact --tombstone-ttl 30d`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch o.Format {
			case weir.JSON, weir.JSONB, weir.Bytes:
			default:
				return usageOf(cmd, "--format is %q, it must be json, jsonb or bytes", o.Format)
			}
			if err := f.check(cmd); err != nil {
				return err
			}
			if f.tombstoneTTL != 0 && !o.Compact {
				return usageOf(cmd, "--tombstone-ttl is for compacted topics: give --compact, or leave it out")
			}
			if !cmd.Flags().Changed("format") {
				o.Format = "" // an existing topic may have another one
			}
			o.SegmentSize, o.RetentionAge, o.RetentionBytes = f.segmentSize, time.Duration(f.retentionAge), int64(f.retentionBytes)
			o.Restricted = f.restricted
			o.DropUnread, o.IdempotencyTTL, o.TombstoneTTL = f.dropUnread, time.Duration(f.idempotencyTTL), time.Duration(f.tombstoneTTL)
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			if err := client.CreateTopic(cmd.Context(), args[0], &o); err != nil {
				return err
			}
			t, err := client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return g.done(shownTopic(t), "topic %q is there, format %s", t.Name, t.Format)
		},
	}
	cmd.Flags().StringVar((*string)(&o.Format), "format", "json", "json, jsonb or bytes")
	cmd.Flags().BoolVar(&o.Compact, "compact", false, "keep only the latest message of each key")
	f.addFlags(cmd, true)
	complete(cmd, "format", "json", "jsonb", "bytes")
	return cmd
}

func topicListCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List all topics",
		Long: `Lists all topics. HEAD is the highest id there is; SETTLED the highest one below which nothing can still appear: groups
get messages up to there. MESSAGES is about how many messages the log has, BYTES what they take on disk with their indexes,
OLDEST when the oldest of them was produced.`,
		Example: "  weir topic list\n  weir topic list --output json | jq -r .topic",
		Args:    arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			topics, err := client.Topics(cmd.Context())
			if err != nil {
				return err
			}
			shown := make([]topicJSON, len(topics))
			for i := range topics {
				shown[i] = shownTopic(topics[i])
			}
			return printAll(g, shown, "TOPIC FORMAT HEAD SETTLED MESSAGES BYTES OLDEST RETENTION SEGMENTS GROUPS CREATED", func(t topicJSON) []any {
				return []any{
					t.Name, t.Format, t.Head, t.Settled, t.Messages, sizeText(t.Bytes), orDash(t.OldestAt), retentionText(t.Topic), t.Segments,
					t.Groups, timeText(t.CreatedAt),
				}
			})
		},
	}
}

func topicDescribeCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:               "describe TOPIC",
		Short:             "Describe a topic and its groups",
		Long:              "Describes a topic: its log, how far it is settled, how long it keeps messages, and the groups that read it.",
		Example:           "  weir topic describe events",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			t, err := client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return g.print(shownTopic(t), func() error {
				err := g.describe(
					"topic", t.Name,
					"format", t.Format,
					"log", t.Log,
					"head", t.Head,
					"settled head", t.Settled,
					"messages", fmt.Sprintf("about %d", t.Messages),
					"size", sizeText(t.Bytes),
					"oldest", orDash(t.OldestAt),
					"segments", fmt.Sprintf("%d of %d ids each at the most", t.Segments, t.SegmentSize),
					"retention", retentionText(t),
					"created", timeText(t.CreatedAt),
					"groups", t.Groups)
				if err != nil || t.Groups == 0 {
					return err
				}
				groups, err := client.Groups(cmd.Context(), t.Name)
				if err != nil {
					return err
				}
				fmt.Fprintln(g.out)
				return printGroups(g, groups)
			})
		},
	}
}

func topicAlterCommand(g *global) *cobra.Command {
	var (
		f              topicFlags
		noAge, noBytes bool
	)
	cmd := &cobra.Command{
		Use:   "alter TOPIC",
		Short: "Change options of a topic",
		Long: `Changes the options of a topic that are given; the others stay. Its format, and whether it is compacted, cannot be changed.

--no-retention-age and --no-retention-bytes take those limits away, --drop-unread=false has retention wait for the groups
again. --segment-size counts for segments that are made from then on, the TTLs for what comes from then on.

` + optionsHelp,
		Example: `  weir topic alter events --retention-age 30d
  weir topic alter events --no-retention-bytes --drop-unread=false`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.check(cmd); err != nil {
				return err
			}
			given := cmd.Flags().Changed
			var change weir.TopicChange
			if given("segment-size") {
				change.SegmentSize = &f.segmentSize
			}
			age, bytes := time.Duration(f.retentionAge), int64(f.retentionBytes) // 0 takes the limit away
			switch {
			case noAge && given("retention-age"):
				return usageOf(cmd, "give --retention-age or --no-retention-age, not both")
			case noAge, given("retention-age"):
				change.RetentionAge = &age
			}
			switch {
			case noBytes && given("retention-bytes"):
				return usageOf(cmd, "give --retention-bytes or --no-retention-bytes, not both")
			case noBytes, given("retention-bytes"):
				change.RetentionBytes = &bytes
			}
			if given("drop-unread") {
				change.DropUnread = &f.dropUnread
			}
			if given("restricted") {
				change.Restricted = &f.restricted
			}
			if given("idempotency-ttl") {
				change.IdempotencyTTL = (*time.Duration)(&f.idempotencyTTL)
			}
			if given("tombstone-ttl") {
				change.TombstoneTTL = (*time.Duration)(&f.tombstoneTTL)
			}
			if change == (weir.TopicChange{}) {
				return usageOf(cmd, "there is nothing to change: give at least one option")
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			if err := client.AlterTopic(cmd.Context(), args[0], change); err != nil {
				return err
			}
			t, err := client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return g.done(shownTopic(t), "topic %q was altered, retention: %s", t.Name, retentionText(t))
		},
	}
	f.addFlags(cmd, false)
	cmd.Flags().BoolVar(&noAge, "no-retention-age", false, "keep messages however old they are")
	cmd.Flags().BoolVar(&noBytes, "no-retention-bytes", false, "keep messages however many bytes they are")
	return cmd
}

func topicRenameCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "rename TOPIC NAME",
		Short: "Give a topic another name",
		Long: `Gives a topic another name. Its messages and groups stay. Producers and consumers that use the old name end: start them
with the new one.`,
		Example:           "  weir topic rename events events-of-last-year",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			err = client.RenameTopic(cmd.Context(), args[0], args[1])
			if errors.Is(err, weir.ErrConflict) {
				return usageOf(cmd, "%w", err)
			}
			if err != nil {
				return err
			}
			return g.done(map[string]any{"topic": args[1], "was": args[0]}, "topic %q is now %q", args[0], args[1])
		},
	}
}

func topicCurrentCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "current TOPIC KEY",
		Short: "Print the latest message of a key",
		Long: `Prints the latest message of a key in a compacted topic: its payload byte for byte as it was stored, and a line break after
it. With --output json it is a JSON document, with id, key, headers, produced_at and payload. The exit code is 1 when there
is none, or it is a tombstone.

` + payloadHelp,
		Example:           "  weir topic current customers ada\n  weir topic current customers ada --output json | jq .payload",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			t, err := client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			m, found, err := client.Current(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			if !found {
				return fmt.Errorf("topic %q has no message of key %q, or its latest is a tombstone", args[0], args[1])
			}
			line := append(m.Raw, '\n')
			if g.json() {
				if line, err = withPayload(asJSON(&m), t.Format, m.Raw); err != nil {
					return err
				}
			}
			_, err = g.out.Write(line)
			return err
		},
	}
}

func topicDeleteKeyCommand(g *global) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "delete-key TOPIC KEY",
		Short: "Remove all messages of a key for good",
		Long: `Removes all messages of a key from a topic for good, after asking; where there is no terminal to ask on, --yes is needed.
Retries and dead letters of that key are removed too. It is for what the law wants gone: groups that have yet to handle
the messages do not get them.

The log is read as a whole, segment by segment, each in a transaction of its own. After an interrupt the same command
removes what is left. The disk holds what was removed until PostgreSQL has vacuumed the log; backups are not touched.`,
		Example:           "  weir topic delete-key customers ada --yes",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			t, err := client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if err := g.confirm(cmd, yes, "All messages of key %q will be removed from topic %q.", args[1], t.Name); err != nil {
				return err
			}
			var bar *progressbar.ProgressBar
			if !g.quiet && isTerminal(g.err) {
				bar = progressbar.NewOptions(t.Segments,
					progressbar.OptionSetWriter(g.err),
					progressbar.OptionSetWidth(24),
					progressbar.OptionThrottle(100*time.Millisecond),
					progressbar.OptionClearOnFinish(),
				)
			}
			deleted, err := client.DeleteKey(cmd.Context(), args[0], args[1], func(_ int, deleted int64) {
				if bar != nil {
					bar.Describe(count(deleted, "message") + " removed")
					_ = bar.Add(1)
				}
			})
			if bar != nil {
				_ = bar.Clear()
			}
			if err != nil {
				return fmt.Errorf("%w (%s removed before it)", err, count(deleted, "message"))
			}
			return g.done(map[string]any{"topic": args[0], "key": args[1], "deleted": deleted},
				"%s of key %q removed from topic %q", count(deleted, "message"), args[1], args[0])
		},
	}
	yesFlag(cmd, &yes)
	return cmd
}

func topicDropCommand(g *global) *cobra.Command {
	var yes, force bool
	cmd := &cobra.Command{
		Use:   "drop TOPIC",
		Short: "Drop a topic with its messages, groups and dead letters",
		Long: `Drops a topic with its messages, groups and dead letters, after asking; where there is no terminal to ask on, --yes is
needed. One that is live, since a consumer of it runs or holds messages, is dropped only with --force; its consumers end.

The name is free at once. Tables that are in use are removed later, by maintenance.`,
		Example:           "  weir topic drop events\n  weir topic drop events --yes --force",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			t, err := client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if err := g.confirm(cmd, yes, "Topic %q, with ids up to %d and %s, will be dropped.", t.Name, t.Head, count(t.Groups, "group")); err != nil {
				return err
			}
			dropped, err := client.DropTopic(cmd.Context(), args[0], &weir.DropOptions{Force: force})
			if errors.Is(err, weir.ErrInUse) {
				err = fmt.Errorf("%w; --force drops it all the same", err)
			}
			if err == nil && !dropped {
				err = fmt.Errorf("%w: %q", weir.ErrTopicNotFound, args[0])
			}
			if err != nil {
				return err
			}
			return g.done(map[string]any{"topic": args[0], "dropped": true}, "topic %q was dropped", args[0])
		},
	}
	yesFlag(cmd, &yes)
	cmd.Flags().BoolVar(&force, "force", false, "also when a consumer of it runs or holds messages")
	return cmd
}

func yesFlag(cmd *cobra.Command, yes *bool) {
	cmd.Flags().BoolVarP(yes, "yes", "y", false, "do not ask")
}

// topicJSON is a topic as JSON, with its retention as the flags take it.
type topicJSON struct {
	weir.Topic
	RetentionAge string `json:"retention_age,omitempty"`
}

func shownTopic(t weir.Topic) topicJSON {
	t.CreatedAt = t.CreatedAt.UTC()
	t.OldestAt = timeInUTC(t.OldestAt)
	shown := topicJSON{Topic: t}
	if t.RetentionAge > 0 {
		shown.RetentionAge = lengthText(t.RetentionAge)
	}
	return shown
}

// retentionText is what a topic keeps, for people.
func retentionText(t weir.Topic) string {
	var parts []string
	if t.RetentionAge > 0 {
		parts = append(parts, lengthText(t.RetentionAge))
	}
	if t.RetentionBytes > 0 {
		parts = append(parts, sizeText(t.RetentionBytes))
	}
	if t.DropUnread && len(parts) > 0 {
		parts = append(parts, "unread too")
	}
	if t.Compact {
		parts = append(parts, "latest of each key")
	}
	if len(parts) == 0 {
		return "all"
	}
	return strings.Join(parts, ", ")
}

// lengthFlag is a length of time: what Go writes, and days.
type lengthFlag time.Duration

func (l *lengthFlag) Type() string { return "duration" }

func (l *lengthFlag) String() string {
	if *l == 0 {
		return "" // pflag shows no default then
	}
	return lengthText(time.Duration(*l))
}

func (l *lengthFlag) Set(text string) error {
	rest, whole := text, time.Duration(0)
	if before, after, found := strings.Cut(text, "d"); found {
		days, err := strconv.ParseUint(before, 10, 31)
		if err != nil {
			return fmt.Errorf("%q is no length of time: write 36h, 90m or 7d", text)
		}
		if days > uint64(math.MaxInt64/(24*time.Hour)) {
			return fmt.Errorf("%s is more than 100 years", text)
		}
		rest, whole = after, time.Duration(days)*24*time.Hour
	}
	if rest != "" || whole == 0 && !strings.HasSuffix(text, "d") {
		part, err := time.ParseDuration(rest)
		if err != nil {
			return fmt.Errorf("%q is no length of time: write 36h, 90m or 7d", text)
		}
		whole += part
	}
	*l = lengthFlag(whole)
	return nil
}

// lengthText is a length of time as lengthFlag takes it.
func lengthText(d time.Duration) string {
	days, rest := d/(24*time.Hour), d%(24*time.Hour)
	switch {
	case days == 0:
		return short(rest)
	case rest == 0:
		return fmt.Sprintf("%dd", days)
	}
	return fmt.Sprintf("%dd%s", days, short(rest))
}

// short leaves out the zeroes at the end of what time.Duration writes.
func short(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// sizeFlag is a number of bytes.
type sizeFlag int64

const sizeUnits = "kMGTP"

func (s *sizeFlag) Type() string { return "bytes" }

func (s *sizeFlag) String() string {
	if *s == 0 {
		return "" // pflag shows no default then
	}
	return strconv.FormatInt(int64(*s), 10)
}

func (s *sizeFlag) Set(text string) error {
	wrong := fmt.Errorf("%q is no size: write a number of bytes, or 500M or 10G", text)
	digits := strings.TrimRight(text, "kKMGTPiB")
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return wrong
	}
	factor := int64(1)
	switch unit := text[len(digits):]; unit {
	case "", "B":
	default:
		at := strings.Index(sizeUnits, strings.Replace(unit[:1], "K", "k", 1))
		if rest := unit[1:]; at < 0 || rest != "" && rest != "B" && rest != "iB" {
			return wrong
		}
		factor = 1 << (10 * (at + 1))
	}
	if n > math.MaxInt64/factor {
		return fmt.Errorf("%s is more bytes than there can be", text)
	}
	*s = sizeFlag(n * factor)
	return nil
}

// sizeText is a number of bytes for people.
func sizeText(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%dB", n)
	}
	value, unit := float64(n), 0
	for value >= 1024 && unit < len(sizeUnits) {
		value /= 1024
		unit++
	}
	return strings.TrimSuffix(strconv.FormatFloat(value, 'f', 1, 64), ".0") + sizeUnits[unit-1:unit] + "B"
}
