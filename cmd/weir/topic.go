package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

func topicCommand(g *global) *cobra.Command {
	return parent(&cobra.Command{
		Use:     "topic",
		Short:   "Create, list, describe and drop topics",
		Long:    "A topic is a named log of messages. What each of these commands does, its own --help says.",
		Example: "  weir topic create events\n  weir topic list\n  weir topic describe events",
	}, topicCreateCommand(g), topicListCommand(g), topicDescribeCommand(g), topicDropCommand(g))
}

func topicCreateCommand(g *global) *cobra.Command {
	var o weir.TopicOptions
	cmd := &cobra.Command{
		Use:   "create TOPIC",
		Short: "Create a topic",
		Long: `Creates a topic. One of that name that exists with the same format is left as it is.

The format cannot be changed later: json keeps the text of each payload byte for byte, jsonb stores payloads parsed, for
queries on the log (white space, key order and duplicate keys are lost), bytes stores anything.`,
		Example: "  weir topic create events\n  weir topic create images --format bytes",
		Args:    arguments,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch o.Format {
			case weir.JSON, weir.JSONB, weir.Bytes:
			default:
				return usageOf(cmd, "--format is %q, it must be json, jsonb or bytes", o.Format)
			}
			if !cmd.Flags().Changed("format") {
				o.Format = "" // an existing topic may have another one
			}
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
			return g.done(inUTC(t), "topic %q is there, format %s", t.Name, t.Format)
		},
	}
	cmd.Flags().StringVar((*string)(&o.Format), "format", "json", "json, jsonb or bytes")
	cmd.Flags().Int64Var(&o.SegmentSize, "segment-size", 0, "ids per segment of the log, 1000 to 1000000000 (default 1000000)")
	complete(cmd, "format", "json", "jsonb", "bytes")
	return cmd
}

func topicListCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List all topics",
		Long: `Lists all topics. HEAD is the highest id there is; SETTLED the highest one below which nothing can still appear: groups
get messages up to there.`,
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
			for i := range topics {
				topics[i] = inUTC(topics[i])
			}
			return printAll(g, topics, "TOPIC FORMAT HEAD SETTLED SEGMENTS GROUPS CREATED", func(t weir.Topic) []any {
				return []any{t.Name, t.Format, t.Head, t.Settled, t.Segments, t.Groups, timeText(t.CreatedAt)}
			})
		},
	}
}

func topicDescribeCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:               "describe TOPIC",
		Short:             "Describe a topic and its groups",
		Long:              "Describes a topic: its log, how far it is settled, and the groups that read it.",
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
			return g.print(inUTC(t), func() error {
				err := g.describe(
					"topic", t.Name,
					"format", t.Format,
					"log", t.Log,
					"head", t.Head,
					"settled head", t.Settled,
					"segments", fmt.Sprintf("%d of %d ids each", t.Segments, t.SegmentSize),
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

func topicDropCommand(g *global) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "drop TOPIC",
		Short: "Drop a topic with its messages, groups and dead letters",
		Long: `Drops a topic with its messages, groups and dead letters, after asking; where there is no terminal to ask on, --yes is
needed. It waits for transactions that use the log.`,
		Example:           "  weir topic drop events\n  weir topic drop events --yes",
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
			dropped, err := client.DropTopic(cmd.Context(), args[0], nil)
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
	return cmd
}

func yesFlag(cmd *cobra.Command, yes *bool) {
	cmd.Flags().BoolVarP(yes, "yes", "y", false, "do not ask")
}

func inUTC(t weir.Topic) weir.Topic {
	t.CreatedAt = t.CreatedAt.UTC()
	return t
}
